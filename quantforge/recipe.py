"""The recipe: one frozen object that says everything about a run. `reading` makes one from files and flags.

The settings, without model and output, are kept beside the weights under ``recipe`` of ``quantforge.json``.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from quantforge.errors import UsageError
from quantforge.rules import BITS_HELP, Rule, checked_bits, checked_group_size, explain_rule
from quantforge.sizes import parse_size
from quantforge.spec import KvCacheName, kv_cache_name
from quantforge.synonyms import OptionValue

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
    the inputs of quantized sites INT8 as well (W8A8); None leaves them alone. `kv_cache` adds scales for an 8-bit
    cache of keys and values. `options` are the method's own. With `sequential` ``none`` sites are solved on the
    original model's inputs, else on those that quantized layers give. `bundle_kernels` has kernels compiled for GPUs of
    these names and put beside the weights.

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
    kv_cache: KvCacheName = Field(
        default="none", description="none, fp8 (E4M3), int8, fp8_per_head or int8_per_head: 8 bits, static, symmetric"
    )
    scale_dtype: Literal["auto", "float16", "bfloat16"] = Field(default="auto", description="auto, float16 or bfloat16")
    tune_epochs: int = Field(default=0, ge=0, description="a whole number of epochs of tuning, 0 for none")
    token_weights: Literal["gradient", "none"] = Field(default="gradient", description="gradient or none")
    sequential: Literal["layer", "group", "none"] = Field(default="layer", description="layer, group or none")
    calibration: CalibrationRecipe = Field(default=CalibrationRecipe(), description="a mapping")
    bundle_kernels: tuple[str, ...] = Field(
        default=(), description="a list of GPU architectures, such as [sm_80, sm_90, gfx942]"
    )
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

    @field_validator("kv_cache", mode="before")
    @classmethod
    def _known_cache(cls, value: Any) -> Any:
        return kv_cache_name(value)

    @field_validator("formats", "ignore", "rules", "transforms", "candidate_bits", "bundle_kernels", mode="before")
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

    @model_validator(mode="wrap")  # the last one: around all others
    @classmethod
    def _in_words(cls, settings: Any, build: ModelWrapValidatorHandler["Recipe"]) -> "Recipe":
        try:
            return build(settings)
        except ValidationError as error:
            raise UsageError("\n".join(explain(error, {}))) from error

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


def explain(error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    """Pydantic's findings in our words: where (`origins`, by setting), what is expected, what was found."""
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
        leaf = name.rpartition(".")[2]
        if found["type"] == "extra_forbidden":
            close = difflib.get_close_matches(leaf, fields, n=1)
            problems.append(f"there is no setting {name!r}{f'; did you mean {close[0]!r}?' if close else ''}")
            continue
        field = fields.get(leaf)
        expected = (field.description if field else None) or "true, false, a number or a string"
        problems.append(f"{origins.get(name, 'recipe')}: {name} must be {expected}; got {found['input']!r}")
    return problems


def default_output(recipe: Recipe, group_size: int | None) -> str:
    """The output directory when none is given: ``SmolLM2-135M-w4g64-gptq``."""
    model = Path(recipe.model.rstrip("/")).name or Path(recipe.model).resolve().name
    if model in (".", ".."):
        model = Path(recipe.model).resolve().name
    return f"{model}-{variant_name(recipe, group_size)}"


def variant_name(recipe: Recipe, group_size: int | str | None) -> str:
    """What is done to the model, in short: ``w4g64-gptq``; `group_size` None is ``pc``, ``auto`` is left out.

    Rules make it ``w4g64-mixed``, quantized activations ``w8a8``, budgets ``w3.5g64``, ``fit90MBg64``, ``kl0.05g64``;
    a cache ends it: ``w4g64-gptq-kvfp8``.
    """
    group = "" if group_size == "auto" else "pc" if group_size in (None, -1) else f"g{group_size}"
    grid = f"w{recipe.bits}{group}" if recipe.activation_bits is None else f"w{recipe.bits}a{recipe.activation_bits}"
    if recipe.budget is not None:
        prefix = {"avg_bits": "w", "fit": "fit", "max_kl": "kl"}[recipe.budget]
        grid = f"{prefix}{str(getattr(recipe, recipe.budget)).replace(' ', '')}{group}"
    variants = ("" if recipe.symmetric else "-asym") + ("-mixed" if recipe.rules else "")
    method = "-".join([*recipe.transforms, *recipe.method.split("+")])
    cache = "" if recipe.kv_cache == "none" else f"-kv{recipe.kv_cache.replace('_', '-')}"
    return f"{grid}{variants}-{method}{cache}"
