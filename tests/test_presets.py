"""Schemes and presets: what a name stands for, and who wins when a preset, a file and flags disagree."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quantforge.errors import UsageError
from quantforge.pipeline.method import choose_method
from quantforge.presets import PRESETS
from quantforge.reading import load_recipe, read_recipe
from quantforge.recipe import Recipe
from quantforge.schemes import SCHEMES

GRID = ("bits", "symmetric", "activation_bits", "group_size", "method")
DEFAULT = (4, True, None, "auto", "gptq")


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "r.yaml"
        path.write_text(text)
        return path

    return write


def grid(source: Path | None, **flags: Any) -> tuple[Any, ...]:
    recipe = load_recipe(source, {"model": "m"} | flags)
    return tuple(getattr(recipe, name) for name in GRID)


def refusal(source: Path | None, **flags: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load_recipe(source, {"model": "m"} | flags)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ schemes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("W2A16", (2, True, None, "auto", "gptq")),
        ("W3A16", (3, True, None, "auto", "gptq")),
        ("W4A16", DEFAULT),
        ("w4a16-asym", (4, False, None, "auto", "gptq")),
        ("W4A16_ASYM", (4, False, None, "auto", "gptq")),
        ("int4", DEFAULT),
        ("W8A16", (8, True, None, "auto", "gptq")),
        ("W8A8", (8, True, 8, -1, "smoothquant+gptq")),
        ("int8", (8, True, 8, -1, "smoothquant+gptq")),
    ],
)
def test_a_scheme_stands_for_its_grid(name: str, expected: tuple[Any, ...], file: Any) -> None:
    assert grid(None, scheme=name) == expected
    assert grid(file(f"scheme: {name}\n")) == expected


def test_every_scheme_is_a_recipe_with_a_known_method() -> None:
    for name in SCHEMES:
        choose_method(load_recipe(None, {"model": "m", "scheme": name}))


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("w4a16_asym", "command line: scheme W4A16_ASYM is read as bits 4, asymmetric"),
        (
            "INT8",
            "command line: scheme W8A8 is read as bits 8, symmetric, activation_bits 8, group_size -1, "
            "method smoothquant+gptq",
        ),
    ],
)
def test_what_a_scheme_is_read_as_is_said(name: str, note: str) -> None:
    assert read_recipe(None, {"model": "m", "scheme": name}).notes == (note,)


@pytest.mark.parametrize(
    ("scheme", "given", "own", "instead"),
    [
        ("W4A16", {"symmetric": False}, "symmetric true", ", or take scheme W4A16_ASYM"),
        ("W4A16", {"bits": 3}, "bits 4", ", or take scheme W3A16"),
        ("W8A16", {"activation_bits": 8}, "activation_bits null", ", or take scheme W8A8"),
        ("W4A16", {"activation_bits": 8}, "activation_bits null", ""),
        ("W8A8", {"group_size": 64}, "group_size -1", ""),
    ],
)
def test_what_contradicts_a_scheme_of_the_same_source_is_refused(
    scheme: str, given: dict[str, Any], own: str, instead: str, file: Any
) -> None:
    ((key, value),) = given.items()
    written = str(value).lower()
    message = f"scheme {scheme} has {own}, and {key} {written} is given too; keep one{instead}"
    assert refusal(None, scheme=scheme, **given) == f"command line: {message}"
    path = file(f"scheme: {scheme}\n{key}: {written}\n")
    assert refusal(path) == f"{path}: {message}"


@pytest.mark.parametrize("budget", [{"avg_bits": 3.5}, {"fit": "90MB"}, {"max_kl": 0.05}], ids=str)
def test_a_budget_contradicts_the_bits_of_a_scheme_of_the_same_source(budget: dict[str, Any]) -> None:
    message = f"scheme W4A16 has bits 4, and {next(iter(budget))} has the bits chosen; keep one"
    assert refusal(None, scheme="W4A16", **budget) == f"command line: {message}"


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("scheme: W4A16\nbits: 4\nactivation_bits: null\n", {}, DEFAULT),  # the same said twice
        ("scheme: W4A16\ngroup_size: 32\nmethod: rtn\n", {}, (4, True, None, 32, "rtn")),  # what a scheme leaves open
        ("scheme: W8A8\ngroup_size: auto\n", {}, (8, True, 8, "auto", "smoothquant+gptq")),  # auto is -1 there
        ("scheme: W4A16_ASYM\n", {"bits": 3}, (3, False, None, "auto", "gptq")),
        ("scheme: W4A16_ASYM\n", {"symmetric": True}, DEFAULT),
        ("scheme: W4A16_ASYM\n", {"scheme": "W3A16"}, (3, True, None, "auto", "gptq")),
        ("scheme: W8A8\n", {"scheme": "W4A16"}, DEFAULT),  # nothing of the file's scheme is left
        ("bits: 3\nsymmetric: false\ngroup_size: 64\n", {"scheme": "W4A16"}, (4, True, None, 64, "gptq")),
        ("bits: 3\ngroup_size: 64\n", {"scheme": "W8A8"}, (8, True, 8, -1, "smoothquant+gptq")),
        ("method: gptq\n", {"scheme": "W8A8"}, (8, True, 8, -1, "gptq")),
        ("scheme: W8A8\n", {"method": "rtn"}, (8, True, 8, -1, "rtn")),
        ("transforms: [smoothquant]\n", {"scheme": "W8A8"}, (8, True, 8, -1, "gptq")),
        ("avg_bits: 3.5\n", {"scheme": "W3A16"}, (3, True, None, "auto", "gptq")),
    ],
)
def test_between_a_file_and_flags_the_later_wins_over_a_scheme(
    text: str, flags: dict[str, Any], expected: tuple[Any, ...], file: Any
) -> None:
    assert grid(file(text), **flags) == expected


def test_a_budget_of_the_flags_wins_over_the_bits_of_a_files_scheme(file: Any) -> None:
    recipe = load_recipe(file("scheme: W4A16_ASYM\n"), {"model": "m", "avg_bits": 3.5})
    assert (recipe.budget_label, recipe.symmetric) == ("avg_bits 3.5", False)


def test_a_wrong_scheme_is_refused_though_flags_name_another(file: Any) -> None:
    assert "unknown scheme 'frog'" in refusal(file("scheme: frog\n"), scheme="W4A16")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("W4A16_ASYMM", "did you mean W4A16_ASYM?"),
        ("W5A16", "weights have 2, 3, 4 or 8 bits"),
        ("W4A8", "and 8 bits beside 8-bit ones"),
        ("NVFP4", "scheme NVFP4 is not supported: its numbers are floating-point"),
        ("fp8_dynamic", "scheme fp8_dynamic is not supported: its numbers are floating-point"),
        ("W4AFP8", "its numbers are floating-point"),
        ("Q4_K_M", "it is a type of GGUF files"),
        ("int4_awq", "say scheme W4A16 and method awq+gptq"),
        ("frog", "unknown scheme 'frog'; schemes: "),
    ],
)
def test_a_scheme_that_is_none_is_refused_with_a_reason_and_all_that_are(name: str, message: str) -> None:
    said = refusal(None, scheme=name)
    assert message in said
    assert said.endswith(f"schemes: {', '.join(SCHEMES)}, and INT8 for W8A8")


def test_a_scheme_that_is_no_name_is_refused() -> None:
    assert refusal(None, scheme=4) == "command line: scheme must be a name such as W4A16; got 4"


# ------------------------------------------------------------------------------------------------ presets


def test_balanced_is_the_defaults() -> None:
    assert load_recipe(None, {"model": "m", "preset": "balanced"}) == Recipe(model="m")


def test_every_preset_sets_known_keys_to_values_of_the_right_kind() -> None:
    for name, preset in PRESETS.items():
        resolved = read_recipe(None, {"model": "m", **preset.settings})
        assert resolved.notes == ()
        assert load_recipe(None, {"model": "m", "preset": name.upper()}) == resolved.recipe


def test_fast_and_best_change_what_they_are_for() -> None:
    fast = load_recipe(None, {"model": "m", "preset": "fast"})
    best = load_recipe(None, {"model": "m", "preset": "best"})
    assert (fast.token_weights, fast.calibration.nsamples, fast.tune_epochs) == ("none", 32, 0)
    assert (best.token_weights, best.calibration.nsamples, best.tune_epochs) == ("gradient", 128, 2)
    assert (fast.method, best.method, best.options) == ("gptq", "awq+gptq", {"refits": 2})


def test_the_method_of_a_preset_gives_way_with_its_options(file: Any) -> None:
    best = {"model": "m", "preset": "best"}
    given = load_recipe(None, best | {"method": "rtn"})
    assert (given.method, given.options, given.tune_epochs) == ("rtn", {}, 2)
    given = load_recipe(file("method: gptq\noptions: {sweeps: 3}\n"), best)
    assert (given.method, given.options) == ("gptq", {"sweeps": 3})
    scheme = load_recipe(None, best | {"scheme": "W8A8"})
    assert (scheme.method, scheme.options) == ("smoothquant+gptq", {})
    kept = load_recipe(None, best | {"scheme": "W4A16", "options": {"sweeps": 1}})
    assert (kept.method, kept.options) == ("awq+gptq", {"refits": 2, "sweeps": 1})
    assert load_recipe(None, best | {"options": {"refits": 0}}).options == {"refits": 0}


@pytest.mark.parametrize("sources", list(product([False, True], repeat=4)), ids=str)
def test_defaults_give_way_to_a_preset_a_preset_to_the_file_and_the_file_to_flags(
    sources: tuple[bool, bool, bool, bool], file: Any
) -> None:
    file_preset, flag_preset, in_file, in_flags = sources
    text = ("preset: fast\n" if file_preset else "") + ("calibration: {nsamples: 7}\n" if in_file else "")
    flags = {"preset": "balanced"} if flag_preset else {}
    flags |= {"nsamples": 9} if in_flags else {}
    recipe = load_recipe(file(text), {"model": "m"} | flags)
    fast = file_preset and not flag_preset  # a preset in the flags takes the place of the file's
    assert recipe.calibration.nsamples == (9 if in_flags else 7 if in_file else 32 if fast else 128)
    assert recipe.token_weights == ("none" if fast else "gradient")


def test_a_preset_does_not_take_the_method_a_scheme_brings_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "fast", type(PRESETS["fast"])("fast", "", {"method": "rtn", "bits": 3}))
    assert grid(None, preset="fast") == (3, True, None, "auto", "rtn")
    assert grid(None, preset="fast", scheme="W8A8") == (8, True, 8, -1, "smoothquant+gptq")
    assert grid(None, preset="fast", scheme="W8A8", method="gptq") == (8, True, 8, -1, "gptq")
    assert load_recipe(None, {"model": "m", "preset": "fast", "avg_bits": 3.5}).budget == "avg_bits"


def test_what_a_preset_comes_to_is_said(file: Any) -> None:
    def notes(source: Path | None, **flags: Any) -> tuple[str, ...]:
        return read_recipe(source, {"model": "m"} | flags).notes

    why = PRESETS["fast"].summary
    assert notes(None, preset="fast") == (
        f"command line: preset fast is read as token_weights none, calibration.nsamples 32 ({why})",
    )
    path = file("preset: fast\nnsamples: 7\n")
    assert notes(path) == (f"{path}: preset fast is read as token_weights none; calibration.nsamples as given ({why})",)
    assert notes(path, token_weights="none") == (
        f"{path}: preset fast changes nothing: all that it sets is given (token_weights, calibration.nsamples)",
    )
    assert notes(path, preset="balanced") == ("command line: preset balanced is read as the defaults",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("besst", "command line: unknown preset 'besst'; did you mean 'best'? presets: fast, balanced, best"),
        ("x", "command line: unknown preset 'x'; presets: fast, balanced, best"),
        (3, "command line: preset must be one of fast, balanced, best; got 3"),
    ],
)
def test_a_preset_that_is_none_is_refused(name: Any, message: str) -> None:
    assert refusal(None, preset=name) == message
