"""Reading a recipe: from defaults, a preset, a YAML file and flags, the later winning key by key.

Names other tools use for the same thing are accepted and announced (`wbits` for `bits`, `percdamp` for
`options.damping`); an unknown key is an error that names the nearest known one. A scheme (W4A16) is what it stands for,
in the source that names it; what usually goes with it gives way to the file and to flags.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from quantforge.errors import UsageError
from quantforge.presets import Preset, find_preset
from quantforge.recipe import BUDGETS, CalibrationRecipe, Recipe, explain
from quantforge.rules import Rule, is_rules, nearest_field
from quantforge.schemes import contradictions, find_scheme, in_words
from quantforge.shipped import shipped_recipes, suggestion
from quantforge.synonyms import SYNONYMS, WITHOUT_COUNTERPART, OptionValue

KEYS = (*Recipe.model_fields, "preset", "scheme")
Found = TypeVar("Found")


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe, and what a user should hear about how it was read."""

    recipe: Recipe
    notes: tuple[str, ...]


class _Reading:
    """One source of settings (a file, or the flags) turned into dotted names; collects problems and notes."""

    def __init__(self, origin: str, data: Mapping[Any, Any]) -> None:
        self.origin = origin
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._written: dict[str, str] = {}
        self._section(data)
        self.preset = self._named("preset", find_preset)
        self.scheme = self._named("scheme", find_scheme)
        if self.scheme is not None:
            self.problems += [f"{origin}: {problem}" for problem in contradictions(self.scheme, self.values, BUDGETS)]

    def _named(self, key: str, find: Callable[[Any], Found]) -> Found | None:
        """The preset or scheme this source names, taken out of its values."""
        name = self.values.pop(key, None)
        try:
            return None if name is None else find(name)
        except UsageError as error:
            self.problems.append(f"{self.origin}: {error}")
            return None

    def _section(self, data: Mapping[Any, Any], prefix: str = "") -> None:
        for key, value in data.items():
            written = f"{prefix}{key}"
            try:
                target, value = self._resolve(str(key).replace("-", "_"), value, prefix)
            except UsageError as error:
                self.problems.append(f"{self.origin}: {written}: {value!r} cannot be had: {error}")
                continue
            if target is None:
                self.problems.append(f"{self.origin}: {unknown_key(str(key), prefix)}")
            elif target in ("calibration", "options"):
                if isinstance(value, Mapping):
                    self._section(value, f"{target}.")
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
            synonym = SYNONYMS.get(name)
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
        if prefix == "" and key in KEYS:
            return key, value
        synonym = SYNONYMS.get(key)
        if synonym is not None and synonym.target.startswith(prefix):
            result = synonym.convert(value)
            if key != synonym.target.rpartition(".")[2]:  # its own name, only outside its section, needs no remark
                read_as = "" if result is value or synonym.target.startswith("options.") else f": {result!r}"
                self.notes.append(f"{self.origin}: {prefix}{key} is read as {synonym.target}{read_as}")
            return synonym.target, result
        if prefix == "options." and key not in WITHOUT_COUNTERPART:  # the method knows its options and refuses others
            return f"options.{key}", value
        return None, value


def unknown_key(key: str, prefix: str = "") -> str:
    """What a message says of a key that no recipe has, `prefix` being the section it stands in, with its dot."""
    name = key.replace("-", "_").lower()
    start = f"unknown key {prefix + key!r}; "
    if name in WITHOUT_COUNTERPART:
        return start + WITHOUT_COUNTERPART[name]
    known = list(CalibrationRecipe.model_fields) if prefix else [*KEYS, *SYNONYMS]
    close = difflib.get_close_matches(name, known, n=1)
    return start + (f"did you mean {prefix + close[0]!r}?" if close else f"known keys: {', '.join(sorted(known))}")


def _read_source(source: str | Path) -> tuple[str, str]:
    """Where a recipe was found and its text: a file, or a shipped recipe when there is no such file."""
    path = Path(source)
    try:
        if (not path.exists() or path.is_dir()) and str(source) in (shipped := shipped_recipes()):
            return f"recipe {source}", shipped[str(source)]
        return str(source), path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(
            f"cannot read the recipe {source}: {error.strerror}, nor is it shipped; {suggestion(str(source))}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the recipe {source}: {reason}") from error


def _parse_yaml(origin: str, text: str) -> Mapping[Any, Any]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{origin} is not valid YAML: {error}") from error
    if data is not None and not isinstance(data, Mapping):
        raise UsageError(f"{origin} must be a mapping of keys to values, like `bits: 4`; it is a {type(data).__name__}")
    if repeated := _repeated_keys(root):
        raise UsageError("\n".join(f"{origin}, line {line}: key {key!r} is given twice" for key, line in repeated))
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


def read_recipe(source: str | Path | None, overrides: Mapping[str, Any]) -> ResolvedRecipe:
    """Merge defaults, a preset, the recipe `source` and `overrides`, the later winning key by key.

    `source` is a file or, when there is no such file, the name of a shipped recipe; `overrides` are flags, under the
    keys of a file. A preset or a scheme in `overrides` takes the place of the file's. Raises UsageError with every
    problem found: unreadable file, unknown or repeated keys, values of the wrong kind, a scheme contradicted.
    """
    readings = [_Reading("command line", overrides)]
    if source is not None:
        origin, text = _read_source(source)
        readings.insert(0, _Reading(origin, _parse_yaml(origin, text)))
    return _merged(readings)


def load_recipe(source: str | Path | None, overrides: Mapping[str, Any]) -> Recipe:
    """`read_recipe` without the notes."""
    return read_recipe(source, overrides).recipe


def recipe_of(name: str, text: str) -> Recipe:
    """The recipe in a YAML text that says everything but the model, which is then called MODEL."""
    return _merged([_Reading(name, {"model": "MODEL"}), _Reading(name, _parse_yaml(name, text))]).recipe


def _merged(readings: Sequence[_Reading]) -> ResolvedRecipe:
    """One recipe of several sources, the later winning; raises UsageError with every problem of all of them."""
    origins: dict[str, str] = {}
    merged: dict[str, Any] = {"options": {}, "calibration": {}}
    layers, notes = _layers(readings)
    for origin, values in layers:
        if any(values.get(name) is not None for name in ("bits", *BUDGETS)):
            for name in ("bits", *BUDGETS):  # one setting, said in one of several ways: the later wins
                merged.pop(name, None)
        for name, value in values.items():
            origins[name] = origin
            section, _, key = name.rpartition(".")
            if section:
                merged[section][key] = _as_number(value) if section == "options" else value
            else:
                merged[name] = value
    problems = [problem for reading in readings for problem in reading.problems]
    try:
        recipe = Recipe(**merged)
    except UsageError as error:
        if not isinstance(cause := error.__cause__, ValidationError):
            raise
        raise UsageError("\n".join(dict.fromkeys(problems + explain(cause, origins)))) from cause
    if problems:
        raise UsageError("\n".join(problems))
    return ResolvedRecipe(recipe, tuple(note for reading in readings for note in reading.notes) + tuple(notes))


def _layers(readings: Sequence[_Reading]) -> tuple[list[tuple[str, Mapping[str, Any]]], list[str]]:
    """Settings with where they are from, the later winning, and what to say of the preset and the scheme in force."""
    layers: list[tuple[str, Mapping[str, Any]]] = []
    notes: list[str] = []
    given = {name for reading in readings for name in reading.values}
    presets = [(reading.origin, reading.preset) for reading in readings if reading.preset is not None]
    schemes = [(reading, reading.scheme) for reading in readings if reading.scheme is not None]
    methods = given | {name for _, scheme in schemes[-1:] for name in scheme.defaults}
    for origin, preset in presets[-1:]:
        values = _Reading(f"preset {preset.name}", preset.settings).values
        if methods & {"method", "transforms"}:  # a preset's options are its method's: both give way
            values = {name: value for name, value in values.items() if not name.startswith(("method", "options."))}
        layers.append((f"preset {preset.name}", values))
        notes.append(f"{origin}: {_explain_preset(preset, values, given)}")
    own: dict[int, Mapping[str, Any]] = {}
    for reading, scheme in schemes[-1:]:
        beside = {} if given & {"method", "transforms"} else scheme.defaults
        layers.append((f"scheme {scheme.name}", beside))
        own[readings.index(reading)] = {
            key: value
            for key, value in scheme.settings.items()
            if key != "bits" or not any(reading.values.get(budget) is not None for budget in BUDGETS)  # told already
        }
        words = [scheme.label(), *(in_words(name, value) for name, value in beside.items())]
        notes.append(f"{reading.origin}: scheme {scheme.name} is read as {', '.join(words)}")
    for number, reading in enumerate(readings):
        layers.append((reading.origin, {**own.get(number, {}), **reading.values}))
    return layers, notes


def _explain_preset(preset: Preset, values: Mapping[str, Any], given: set[str]) -> str:
    """What a preset comes to beside the settings that are given."""
    in_force = [in_words(name, value) for name, value in values.items() if name not in given]
    passed_over = ", ".join(name for name in values if name in given)
    if passed_over and not in_force:
        return f"preset {preset.name} changes nothing: all that it sets is given ({passed_over})"
    said = f"; {passed_over} as given" if passed_over else ""
    why = f" ({preset.summary})" if values else ""
    return f"preset {preset.name} is read as {', '.join(in_force) or 'the defaults'}{said}{why}"
