"""The recipe: one frozen object that says everything about a run, from defaults, a YAML file and flags, in that order.

Names other tools use for the same thing are accepted and announced (`wbits` for `bits`, `percdamp` for
`options.damping`); an unknown key is an error that names the nearest known one. The settings, without model and output,
are kept beside the weights under ``recipe`` of ``quantforge.json``.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quantforge.errors import UsageError
from quantforge.rules import BITS_HELP, Rule, checked_bits, checked_group_size, explain_rule, is_rules, nearest_field
from quantforge.sizes import parse_size

OptionValue = bool | int | float | str

BUDGETS = ("avg_bits", "fit", "max_kl")
"""Settings of which at most one may be given, in place of `bits`."""


class CalibrationRecipe(BaseModel):
    """Where calibration tokens come from; `dataset` None lets the run choose. Descriptions end error messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dataset: str | None = Field(
        default=None, description="a file, a directory, a dataset id, builtin, self, or null for the default"
    )
    subset: str | None = Field(default=None, description="the dataset's configuration name, or null")
    split: str | None = Field(default=None, description="the dataset's split, or null")
    column: str | None = Field(default=None, description="the column that holds the text, or null")
    nsamples: int = Field(default=128, ge=1, description="a positive integer: sequences of seqlen tokens")
    seqlen: int = Field(default=512, ge=2, description="an integer of at least 2: tokens in a sequence")
    bos: Literal["auto", "always", "never"] = Field(default="auto", description="auto, always or never")


class Recipe(BaseModel):
    """What to do to which model. Frozen; unknown keys are refused. Descriptions end error messages.

    `group_size` -1 is one scale per output channel, ``auto`` lets the plan choose. `ignore` holds site names, as shell
    patterns or, after ``re:``, regular expressions. `rules` give sites grids of their own. `activation_bits` 8 makes
    the inputs of quantized sites INT8 as well (W8A8); None leaves them alone. `options` are the method's own. With
    `sequential` ``none`` sites are solved on the original model's inputs, else on those that quantized layers give.

    A budget has the bits of each site chosen from `candidate_bits` (none given: all that the formats can hold), except
    where a rule names bits; `bits` then means nothing, and there is at most one budget. `avg_bits` is the mean width of
    a code over the quantized weights: 4 bits everywhere are 4.0, whatever the scales take. `fit` limits the bytes of
    all exported tensors, quantized or not. `max_kl` limits the predicted KL from the original in nats a token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str = Field(min_length=1, description="a local directory or a hub id")
    output: str | None = Field(default=None, min_length=1, description="a directory that does not exist yet, or null")
    method: str = Field(default="gptq", description="the name of a method, or several joined by +")
    transforms: tuple[str, ...] = Field(default=(), description="a list of transforms to apply before the method")
    bits: int = Field(default=4, description=BITS_HELP)
    avg_bits: float | None = Field(
        default=None, gt=0, le=8, description="mean bits of a quantized weight, such as 3.5, or null"
    )
    fit: str | int | None = Field(default=None, description="a size such as 90MB, or null")
    max_kl: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="a positive number of nats a token, such as 0.05, or null"
    )
    candidate_bits: tuple[int, ...] = Field(default=(), description=f"a list of bits, each {BITS_HELP}")
    group_size: int | Literal["auto"] = Field(
        default="auto", description="auto, a positive integer, or -1 for one scale per output channel"
    )
    symmetric: bool = Field(default=True, description="true or false")
    formats: tuple[str, ...] = Field(
        default=("compressed-tensors",), min_length=1, description="one or more format names"
    )
    options: dict[str, OptionValue] = Field(default={}, description="a mapping of the method's options to plain values")
    ignore: tuple[str, ...] = Field(default=(), description="a list of site name patterns")
    rules: tuple[Rule, ...] = Field(default=(), description="a list of rules, such as {match: '*.down_proj', bits: 8}")
    activation_bits: Literal[8] | None = Field(default=None, description="8, or null for floating point")
    scale_dtype: Literal["auto", "float16", "bfloat16"] = Field(default="auto", description="auto, float16 or bfloat16")
    token_weights: Literal["gradient", "none"] = Field(default="gradient", description="gradient or none")
    sequential: Literal["layer", "group", "none"] = Field(default="layer", description="layer, group or none")
    calibration: CalibrationRecipe = Field(default=CalibrationRecipe(), description="a mapping")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="auto, cpu, cuda or mps")
    max_shard_size: str | int = Field(default="5GB", description="a size such as 5GB or 500MiB")
    strict: bool = Field(default=False, description="true or false")
    trust_remote_code: bool = Field(default=False, description="true or false")
    allow_pickle: bool = Field(default=False, description="true or false")

    @field_validator("bits")
    @classmethod
    def _known_bits(cls, bits: int) -> int:
        return checked_bits(bits)

    @field_validator("group_size")
    @classmethod
    def _possible_group(cls, group_size: int | str) -> int | str:
        return checked_group_size(group_size) if isinstance(group_size, int) else group_size

    @field_validator("candidate_bits")
    @classmethod
    def _known_candidates(cls, candidates: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({checked_bits(bits) for bits in candidates}))

    @field_validator("max_shard_size", "fit")
    @classmethod
    def _readable_size(cls, size: str | int | None) -> str | int | None:
        try:
            if size is not None:
                parse_size(size)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return size

    @field_validator("formats", "ignore", "rules", "transforms", "candidate_bits", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """A YAML list, or one value alone, as a tuple."""
        return (
            (value,) if isinstance(value, str | int | Mapping) else tuple(value) if isinstance(value, list) else value
        )

    @model_validator(mode="after")
    def _one_budget(self) -> "Recipe":
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are budgets, and there can be only one")
        if given and "bits" in self.model_fields_set:
            raise ValueError(f"{given[0]} has the bits chosen, so bits cannot be given too; see candidate_bits")
        if self.candidate_bits and not given:
            raise ValueError(f"candidate_bits needs a budget: {', '.join(BUDGETS)}")
        return self

    @property
    def budget(self) -> str | None:
        """The name of the budget in force."""
        return next((name for name in BUDGETS if getattr(self, name) is not None), None)

    @property
    def budget_label(self) -> str | None:
        """``avg_bits 3.5``, ``fit 90MB``, ``max_kl 0.05``."""
        return None if self.budget is None else f"{self.budget} {getattr(self, self.budget)}"

    @property
    def max_shard_bytes(self) -> int:
        return parse_size(self.max_shard_size)


def default_output(recipe: Recipe, group_size: int | None) -> str:
    """The output directory when none is given: ``SmolLM2-135M-w4g64-gptq``."""
    model = Path(recipe.model.rstrip("/")).name or Path(recipe.model).resolve().name
    if model in (".", ".."):
        model = Path(recipe.model).resolve().name
    return f"{model}-{variant_name(recipe, group_size)}"


def variant_name(recipe: Recipe, group_size: int | str | None) -> str:
    """What is done to the model, in short: ``w4g64-gptq``; `group_size` None is ``pc``, ``auto`` is left out.

    Rules make it ``w4g64-mixed``, quantized activations ``w8a8``, budgets ``w3.5g64``, ``fit90MBg64``, ``kl0.05g64``.
    """
    group = "" if group_size == "auto" else "pc" if group_size in (None, -1) else f"g{group_size}"
    grid = f"w{recipe.bits}{group}" if recipe.activation_bits is None else f"w{recipe.bits}a{recipe.activation_bits}"
    if recipe.budget is not None:
        prefix = {"avg_bits": "w", "fit": "fit", "max_kl": "kl"}[recipe.budget]
        grid = f"{prefix}{str(getattr(recipe, recipe.budget)).replace(' ', '')}{group}"
    variants = ("" if recipe.symmetric else "-asym") + ("-mixed" if recipe.rules else "")
    method = "-".join([*recipe.transforms, *recipe.method.split("+")])
    return f"{grid}{variants}-{method}"


# ------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe, and what a user should hear about how it was read."""

    recipe: Recipe
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Synonym:
    """Another name for `target` (dotted); `values` rewrites the values that mean something else there."""

    target: str
    values: tuple[tuple[OptionValue, OptionValue], ...] = ()

    def convert(self, value: Any) -> Any:
        for source, result in self.values:
            if type(value) is type(source) and value == source:
                return result
        return value


_INVERSE = ((True, False), (False, True))
_STATIC = (("static", True), ("weight", True))  # groups stay contiguous; act-order only permutes the solving

_SYNONYMS = {
    **dict.fromkeys(("wbits", "w_bit", "num_bits"), _Synonym("bits")),
    **dict.fromkeys(("groupsize", "q_group_size"), _Synonym("group_size")),
    "sym": _Synonym("symmetric"),
    **dict.fromkeys(("asym", "zero_point"), _Synonym("symmetric", _INVERSE)),
    **dict.fromkeys(("format", "export_format"), _Synonym("formats")),
    **dict.fromkeys(("output_dir", "export_path"), _Synonym("output")),
    **dict.fromkeys(("modules_to_not_convert", "ignore_layers", "exclude_modules"), _Synonym("ignore")),
    **dict.fromkeys(("a_bits", "act_bits", "abits"), _Synonym("activation_bits")),
    **dict.fromkeys(("target_bits", "effective_bits", "target_bpw"), _Synonym("avg_bits")),
    "true_sequential": _Synonym("sequential", ((True, "group"), (False, "layer"))),
    **dict.fromkeys(("damping", "damp", "percdamp", "damp_percent", "dampening_frac"), _Synonym("options.damping")),
    **dict.fromkeys(("act_order", "desc_act", "actorder"), _Synonym("options.act_order", _STATIC)),
    **dict.fromkeys(("num_calibration_samples", "calib_size"), _Synonym("calibration.nsamples")),
    **dict.fromkeys(("max_seq_length", "calib_seq"), _Synonym("calibration.seqlen")),
    **{name: _Synonym(f"calibration.{name}") for name in CalibrationRecipe.model_fields},
}


class _Reading:
    """One source of settings (a file, or the flags) being turned into dotted names; collects problems and notes."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._written: dict[str, str] = {}

    def section(self, data: Mapping[Any, Any], prefix: str = "") -> None:
        for key, value in data.items():
            written = f"{prefix}{key}"
            target, value = self._resolve(str(key).replace("-", "_"), value, prefix)
            if target is None:
                self.problems.append(f"{self.origin}: unknown key {written!r}{self._nearest(str(key), prefix)}")
            elif target in ("calibration", "options"):
                if isinstance(value, Mapping):
                    self.section(value, f"{target}.")
                elif value is not None:
                    self.problems.append(f"{self.origin}: {written} must be a mapping; got {value!r}")
            elif target in self.values:
                first = self._written[target]
                self.problems.append(f"{self.origin}: {first!r} and {written!r} both set {target}; keep one")
            else:
                self.values[target] = self._rules(value, written) if target == "rules" else value
                self._written[target] = written

    def _rules(self, value: Any, written: str) -> Any:
        """Rules with synonyms resolved."""
        rules = [value] if isinstance(value, Mapping) else value
        if not is_rules(rules):
            return value
        return tuple(self._rule(rule, f"{written}[{number}]") for number, rule in enumerate(rules))

    def _rule(self, rule: Mapping[Any, Any], written: str) -> dict[str, Any]:
        resolved: dict[str, Any] = {}
        for key, value in rule.items():
            name = str(key).replace("-", "_")
            synonym = _SYNONYMS.get(name)
            if name not in Rule.model_fields and synonym is not None and synonym.target in Rule.model_fields:
                name, value = synonym.target, synonym.convert(value)
                self.notes.append(f"{self.origin}: {written}.{key} is read as {name}: {value!r}")
            if name not in Rule.model_fields:
                self.problems.append(f"{self.origin}: unknown key '{written}.{key}'; {nearest_field(name)}")
            elif name in resolved:
                self.problems.append(f"{self.origin}: {written} sets {name} twice; keep one")
            else:
                resolved[name] = value
        return resolved

    def _resolve(self, key: str, value: Any, prefix: str) -> tuple[str | None, Any]:
        """The dotted name `key` stands for, None when unknown, and the value in its terms."""
        if prefix == "" and key in Recipe.model_fields:
            return key, value
        synonym = _SYNONYMS.get(key)
        if synonym is not None and synonym.target.startswith(prefix):
            result = synonym.convert(value)
            if key != synonym.target.rpartition(".")[2]:  # its own name, only outside its section, needs no remark
                read_as = "" if result is value or synonym.target.startswith("options.") else f": {result!r}"
                self.notes.append(f"{self.origin}: {prefix}{key} is read as {synonym.target}{read_as}")
            return synonym.target, result
        if prefix == "options.":  # the method knows its options and refuses others
            return f"options.{key}", value
        return None, value

    @staticmethod
    def _nearest(key: str, prefix: str) -> str:
        known = list(CalibrationRecipe.model_fields) if prefix else [*Recipe.model_fields, *_SYNONYMS]
        close = difflib.get_close_matches(key.replace("-", "_").lower(), known, n=1)
        return f"; did you mean {prefix + close[0]!r}?" if close else f"; known keys: {', '.join(sorted(known))}"


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the recipe {path}: {reason}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from error
    if data is not None and not isinstance(data, Mapping):
        raise UsageError(f"{path} must be a mapping of keys to values, like `bits: 4`; it is a {type(data).__name__}")
    if repeated := _repeated_keys(root):
        raise UsageError("\n".join(f"{path}, line {line}: key {key!r} is given twice" for key, line in repeated))
    return data or {}


def _repeated_keys(node: yaml.Node | None) -> list[tuple[str, int]]:
    """(key, line) of keys that a mapping repeats; YAML itself would silently keep the last."""
    if isinstance(node, yaml.SequenceNode):
        return [repeated for entry in node.value for repeated in _repeated_keys(entry)]
    if not isinstance(node, yaml.MappingNode):
        return []
    found: list[tuple[str, int]] = []
    seen: set[str] = set()
    for key, value in node.value:
        if key.value in seen:
            found.append((str(key.value), key.start_mark.line + 1))
        seen.add(key.value)
        found += _repeated_keys(value)
    return found


def parse_scalar(text: str) -> OptionValue:
    """A value as YAML reads it, and ``1e-2`` as the number it is meant to be (YAML 1.1 asks for a dot)."""
    value = yaml.safe_load(text)
    return _as_number(value) if isinstance(value, bool | int | float | str) else text


def _as_number(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def read_recipe(path: Path | None, overrides: Mapping[str, Any]) -> ResolvedRecipe:
    """Merge defaults, the file at `path`, and `overrides` (flags; same keys as the file), the later winning key by key.

    Raises UsageError with every problem found: unreadable file, unknown or repeated keys, values of the wrong kind.
    """
    readings = [_Reading("command line")]
    readings[0].section(overrides)
    if path is not None:
        readings.insert(0, _Reading(str(path)))
        readings[0].section(_read_yaml(path))
    origins: dict[str, str] = {}
    merged: dict[str, Any] = {"options": {}, "calibration": {}}
    for reading in readings:
        if any(reading.values.get(name) is not None for name in ("bits", *BUDGETS)):
            for name in ("bits", *BUDGETS):  # one setting, said in one of several ways: the later wins
                merged.pop(name, None)
        for name, value in reading.values.items():
            origins[name] = reading.origin
            section, _, key = name.rpartition(".")
            if section:
                merged[section][key] = _as_number(value) if section == "options" else value
            else:
                merged[name] = value
    problems = [problem for reading in readings for problem in reading.problems]
    try:
        recipe = Recipe(**merged)
    except ValidationError as error:
        raise UsageError("\n".join(dict.fromkeys(problems + _explain(error, origins)))) from error
    if problems:
        raise UsageError("\n".join(problems))
    return ResolvedRecipe(recipe, tuple(note for reading in readings for note in reading.notes))


def load_recipe(path: Path | None, overrides: Mapping[str, Any]) -> Recipe:
    """`read_recipe` without the notes."""
    return read_recipe(path, overrides).recipe


def _explain(error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    """Pydantic's findings in our words: where it was written, what is expected, what was found."""
    problems = []
    for found in error.errors():
        if not found["loc"]:  # several settings that contradict each other
            problems.append(str(found["ctx"]["error"]))
            continue
        if found["loc"][:1] == ("rules",) and len(found["loc"]) > 2:
            problems.append(
                f"{origins.get('rules', 'recipe')}: {explain_rule(found['loc'][1:], found['type'], found['input'])}"
            )
            continue
        section = found["loc"][0] if found["loc"] and found["loc"][0] in ("calibration", "options") else None
        name = ".".join(map(str, found["loc"][: 2 if section else 1]))
        if found["type"] == "missing":
            problems.append(f"no {name} is given; it is {Recipe.model_fields[name].description}")
            continue
        fields = CalibrationRecipe.model_fields if section == "calibration" else Recipe.model_fields
        field = fields.get(name.rpartition(".")[2])
        expected = (field.description if field else None) or "true, false, a number or a string"
        problems.append(f"{origins.get(name, 'recipe')}: {name} must be {expected}; got {found['input']!r}")
    return problems
