"""The recipe: one meaning per setting, whichever way it is written."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantforge.errors import UsageError
from quantforge.reading import KEYS, load_recipe, parse_scalar, read_recipe
from quantforge.recipe import CalibrationRecipe, Recipe, default_output
from quantforge.rules import Rule, parse_rule
from quantforge.sizes import parse_size
from quantforge.synonyms import SYNONYMS, WITHOUT_COUNTERPART


def written(folder: Path, text: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(text)
    return path


def refusal(path: Path | None, **flags: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load_recipe(path, {"model": "m"} | flags)
    return str(caught.value)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "model: from-file\nbits: 3\ngroup_size: 32\ncalibration:\n  nsamples: 7\n  seqlen: 64\n")
    recipe = load_recipe(path, {"bits": 8, "nsamples": 9})
    assert (recipe.model, recipe.bits, recipe.group_size, recipe.symmetric) == ("from-file", 8, 32, True)
    assert (recipe.calibration.nsamples, recipe.calibration.seqlen) == (9, 64)


def test_options_of_file_and_flags_merge_key_by_key(tmp_path: Path) -> None:
    path = written(tmp_path, "options: {damping: 0.05, act_order: false}\n")
    recipe = load_recipe(path, {"model": "m", "options": {"act_order": True}})
    assert recipe.options == {"damping": 0.05, "act_order": True}


def test_an_unknown_key_names_the_file_the_key_and_the_nearest_key(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, "group_sise: 64\ncalibration: {nsample: 3}\n"))
    assert "r.yaml: unknown key 'group_sise'; did you mean 'group_size'?" in message
    assert "unknown key 'calibration.nsample'; did you mean 'calibration.nsamples'?" in message


def test_every_problem_is_reported_at_once_in_our_words(tmp_path: Path) -> None:
    path = written(tmp_path, "bits: five\nsymmetric: 3\ncolour: red\ncalibration: {nsamples: 0}\noptions: {a: [1]}\n")
    message = refusal(path, device="tpu", group_size=0)
    for expected in (
        "r.yaml: bits must be one of 2, 3, 4, 8; got 'five'",
        "r.yaml: symmetric must be true or false; got 3",
        "r.yaml: unknown key 'colour'",
        "r.yaml: calibration.nsamples must be a positive integer: sequences of seqlen tokens; got 0",
        "r.yaml: options.a must be true, false, a number or a string; got [1]",
        "command line: device must be auto, cpu, cuda or mps; got 'tpu'",
        "command line: group_size must be auto, a positive integer, or -1 for one scale per output channel; got 0",
    ):
        assert expected in message
    assert len(message.splitlines()) == 7
    assert "pydantic" not in message


def test_a_missing_model_is_said() -> None:
    with pytest.raises(UsageError, match="no model is given; it is a local directory or a hub id"):
        load_recipe(None, {"bits": 4})


@pytest.mark.parametrize("bits", [True, 4.0, "4", 5, 0, None])
def test_bits_of_another_kind_are_refused(bits: Any) -> None:
    assert "bits must be one of 2, 3, 4, 8" in refusal(None, bits=bits)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("wbits: 3", "bits", 3),
        ("w_bit: 8", "bits", 8),
        ("num_bits: 2", "bits", 2),
        ("groupsize: -1", "group_size", -1),
        ("q_group_size: 64", "group_size", 64),
        ("group-size: 64", "group_size", 64),
        ("sym: false", "symmetric", False),
        ("zero_point: true", "symmetric", False),
        ("zero_point: false", "symmetric", True),
        ("format: gptq", "formats", ("gptq",)),
        ("formats: [gptq, compressed-tensors]", "formats", ("gptq", "compressed-tensors")),
        ("modules_to_not_convert: [lm_head]", "ignore", ("lm_head",)),
        ("ignore: lm_head", "ignore", ("lm_head",)),
        ("true_sequential: true", "sequential", "group"),
        ("percdamp: .01", "options", {"damping": 0.01}),
        ("options: {damp_percent: 0.05}", "options", {"damping": 0.05}),
        ("dampening_frac: 1e-2", "options", {"damping": 0.01}),
        ("desc_act: true", "options", {"act_order": True}),
        ("actorder: static", "options", {"act_order": True}),
        ("act-order: false", "options", {"act_order": False}),
        ("actorder: null", "options", {"act_order": False}),
        ("blocksize: 64", "options", {"block_size": 64}),
        ("fp_layers: [lm_head]", "ignore", ("lm_head",)),
        ("qformat: int8_sq", "activation_bits", 8),
    ],
)
def test_names_from_other_tools_are_understood(tmp_path: Path, text: str, field: str, value: Any) -> None:
    assert getattr(load_recipe(written(tmp_path, text), {"model": "m"}), field) == value


@pytest.mark.parametrize(
    ("text", "nsamples", "seqlen"),
    [
        ("num_calibration_samples: 5\nmax_seq_length: 33", 5, 33),
        ("calibration: {num_calibration_samples: 5, max_seq_length: 33}", 5, 33),
        ("nsamples: 5\nseqlen: 33", 5, 33),
    ],
)
def test_calibration_settings_are_understood_inside_and_outside_their_section(
    tmp_path: Path, text: str, nsamples: int, seqlen: int
) -> None:
    calibration = load_recipe(written(tmp_path, text), {"model": "m"}).calibration
    assert (calibration.nsamples, calibration.seqlen) == (nsamples, seqlen)


def test_a_synonym_is_announced_and_a_proper_name_is_not(tmp_path: Path) -> None:
    path = written(tmp_path, "wbits: 3\ngroup_size: 64\nzero_point: true\n")
    notes = read_recipe(path, {"model": "m"}).notes
    assert notes == (f"{path}: wbits is read as bits", f"{path}: zero_point is read as symmetric: False")


def test_flags_in_their_own_names_bring_no_notes() -> None:
    flags = {"model": "m", "bits": 4, "nsamples": 3, "options": {"damping": 0.1}}
    assert read_recipe(None, flags).notes == ()


def test_one_setting_under_two_names_is_refused(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, "bits: 4\nwbits: 3\n"))
    assert "'bits' and 'wbits' both set bits; keep one" in message


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("damp_auto_increment: 0.1", "unknown key 'damp_auto_increment'; damping is raised without being asked"),
        ("options: {damp_auto_increment: 0.1}", "unknown key 'options.damp_auto_increment'; damping is raised"),
        ("actorder: group", "actorder: 'group' cannot be had: groups are always runs of neighbouring columns here"),
        ("quant-lm-head: true", "unknown key 'quant-lm-head'; the output head stays in floating point"),
        ("dynamic: {x: {bits: 8}}", "unknown key 'dynamic'; say it with `rules`"),
        ("low_gpu_mem_usage: true", "unknown key 'low_gpu_mem_usage'; only one decoder layer is in memory"),
    ],
)
def test_settings_of_other_tools_without_a_counterpart_get_an_answer(tmp_path: Path, text: str, answer: str) -> None:
    assert f"r.yaml: {answer}" in refusal(written(tmp_path, text))


def test_every_synonym_leads_to_a_key_of_a_recipe_and_hides_none() -> None:
    fields = {*KEYS, *(f"calibration.{name}" for name in CalibrationRecipe.model_fields)}
    for name, synonym in SYNONYMS.items():
        assert synonym.target in fields or synonym.target.startswith("options."), name
        assert name not in KEYS and name not in WITHOUT_COUNTERPART
    assert {f"calibration.{name}" for name in CalibrationRecipe.model_fields} <= {s.target for s in SYNONYMS.values()}
    assert not {*KEYS} & {*WITHOUT_COUNTERPART}


def test_rules_are_read_in_order_with_names_from_other_tools(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        r"""rules:
  - {match: "*.down_proj", wbits: 8, q_group_size: -1}
  - {match: 're:layers\.(0|29)\.', skip: true}
  - {match: "*", zero_point: true}
""",
    )
    resolved = read_recipe(path, {"model": "m"})
    assert resolved.recipe.rules == (
        Rule(match="*.down_proj", bits=8, group_size=-1),
        Rule(match=r"re:layers\.(0|29)\.", skip=True),
        Rule(match="*", symmetric=False),
    )
    assert f"{path}: rules[0].wbits is read as bits: 8" in resolved.notes
    assert f"{path}: rules[2].zero_point is read as symmetric: False" in resolved.notes


def test_one_rule_alone_needs_no_list_and_rules_of_flags_take_the_place_of_the_files(tmp_path: Path) -> None:
    path = written(tmp_path, "rules: {match: a, bits: 8}\n")
    assert load_recipe(path, {"model": "m"}).rules == (Rule(match="a", bits=8),)
    assert load_recipe(path, {"model": "m", "rules": [{"match": "b", "bits": 3}]}).rules == (Rule(match="b", bits=3),)


def test_every_problem_of_rules_is_told_with_its_place(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """rules:
  - {match: a, bitz: 8, colour: red}
  - {bits: 5, group_size: 0, symmetric: 1}
  - {match: b, bits: 8, skip: true}
  - {match: c, wbits: 8, bits: 4}
""",
    )
    message = refusal(path)
    for expected in (
        "r.yaml: unknown key 'rules[0].bitz'; did you mean 'bits'?",
        "r.yaml: unknown key 'rules[0].colour'; known keys: match, bits, group_size, symmetric, skip",
        "r.yaml: rules[1].match must be a pattern of site names; it is missing",
        "r.yaml: rules[1].bits must be one of 2, 3, 4, 8; got 5",
        "r.yaml: rules[1].group_size must be a positive integer, or -1 for one scale per output channel; got 0",
        "r.yaml: rules[1].symmetric must be true or false; got 1",
        "r.yaml: rules[2].skip must be true or false, and alone beside match when it is true; got True",
        "r.yaml: rules[3] sets bits twice; keep one",
    ):
        assert expected in message, expected
    assert len(message.splitlines()) == 8


@pytest.mark.parametrize("text", ["rules: [a]", "rules: 3", "rules: {a: 3}"])
def test_rules_that_are_no_mappings_are_refused(tmp_path: Path, text: str) -> None:
    assert "rules" in refusal(written(tmp_path, text)) and "pydantic" not in refusal(written(tmp_path, text))


def test_a_key_that_a_rule_repeats_is_refused_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, "rules:\n  - match: a\n    bits: 4\n    bits: 8\n")
    assert "line 4: key 'bits' is given twice" in refusal(path)


@pytest.mark.parametrize("value", [4, 16, True, "8"])
def test_activations_of_other_widths_are_refused(value: Any) -> None:
    assert "activation_bits must be 8, or null for floating point" in refusal(None, activation_bits=value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*.down_proj=bits:8,group_size:64", {"match": "*.down_proj", "bits": "8", "group_size": "64"}),
        ("re:(?=x)y= skip", {"match": "re:(?=x)y", "skip": "true"}),
        ("a=symmetric:false", {"match": "a", "symmetric": "false"}),
    ],
)
def test_a_rule_in_one_string_is_a_pattern_and_settings(text: str, expected: dict[str, str]) -> None:
    assert parse_rule(text) == expected


@pytest.mark.parametrize(
    "text", ["", "a", "a=", "=skip", "a=bits", "a=bits:", "a=8", "a=bits:8,bits:4", "a=skip,bits:8"]
)
def test_a_rule_in_one_string_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--rule"):
        parse_rule(text)


def test_outputs_of_mixed_and_of_w8a8_runs_have_names_of_their_own() -> None:
    rule = Rule(match="a", bits=8)
    assert default_output(Recipe(model="m", rules=(rule,)), 64) == "m-w4g64-mixed-gptq"
    assert default_output(Recipe(model="m", bits=8, activation_bits=8, rules=(rule,)), None) == "m-w8a8-mixed-gptq"


def test_a_key_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    assert "line 3: key 'bits' is given twice" in refusal(written(tmp_path, "bits: 4\nmethod: rtn\nbits: 3\n"))


@pytest.mark.parametrize(("text", "reason"), [("bits: [4", "not valid YAML"), ("- 4", "must be a mapping")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in refusal(written(tmp_path, text))


def test_a_missing_recipe_file_is_named(tmp_path: Path) -> None:
    assert "cannot read the recipe" in refusal(tmp_path / "none.yaml")


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, "# nothing\n"), {"model": "m"}) == Recipe(model="m")


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        Recipe(model="m").bits = 3  # type: ignore[misc]


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.sampled_from([-1, 32, 128, "auto"]),
    symmetric=st.booleans(),
    formats=st.sampled_from([("gptq",), ("gptq", "compressed-tensors")]),
    options=st.dictionaries(
        st.sampled_from(["damping", "act_order", "name"]), st.booleans() | st.floats(0, 1), max_size=3
    ),
    rules=st.lists(
        st.sampled_from([{"match": "a", "bits": 8}, {"match": "re:b", "skip": True}, {"match": "*", "group_size": -1}])
    ),
    activation_bits=st.sampled_from([None, 8]),
    nsamples=st.integers(1, 10**6),
)
def test_the_settings_kept_beside_the_weights_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, **fields: Any
) -> None:
    recipe = load_recipe(None, fields | {"model": "m", "output": "out"})
    path = tmp_path_factory.getbasetemp() / "kept.json"
    path.write_text(json.dumps(recipe.model_dump(mode="json", exclude={"model", "output"})), encoding="utf-8")
    again = read_recipe(path, {"model": "m", "output": "out"})
    assert again.recipe == recipe
    assert again.notes == ()


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("5GB", 5 * 10**9),
        ("500 MB", 5 * 10**8),
        ("1.5kb", 1500),
        ("2MiB", 2**21),
        ("1000", 1000),
        (77, 77),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "0", "5 parsecs", "1e9"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="a size is a positive number with a unit"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("0.5", 0.5),
        ("1e-2", 0.01),
        ("true", True),
        ("static", "static"),
        ("", ""),
        ("[1]", "[1]"),
        ("a: b", "a: b"),
    ],
)
def test_option_values_are_typed_as_in_yaml(text: str, value: Any) -> None:
    parsed = parse_scalar(text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("model", "group_size", "symmetric", "name"),
    [
        ("org/SmolLM2-135M", 64, True, "SmolLM2-135M-w4g64-gptq"),
        ("./models/tiny/", None, True, "tiny-w4pc-gptq"),
        ("tiny", 128, False, "tiny-w4g128-asym-gptq"),
    ],
)
def test_the_default_output_says_model_and_grid(model: str, group_size: int | None, symmetric: bool, name: str) -> None:
    assert default_output(Recipe(model=model, symmetric=symmetric), group_size) == name


def test_a_wrong_recipe_in_python_is_an_error_of_ours_in_words() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": "x", "bitz": 4}, "there is no setting 'bitz'; did you mean 'bits'?"),
        ({"model": "x", "calibration": {"nsample": 4}}, "no setting 'calibration.nsample'; did you mean 'nsamples'?"),
        ({"model": "x", "bits": 5}, "recipe: bits must be one of 2, 3, 4, 8; got 5"),
        ({}, "no model is given; it is a local directory or a hub id"),
        ({"model": "x", "bits": 4, "avg_bits": 3.5}, "avg_bits has the bits chosen, so bits cannot be given too"),
    ]
    for settings, said in wrong:
        with pytest.raises(UsageError) as caught:
            Recipe(**settings)
        assert said in str(caught.value) and "pydantic" not in str(caught.value)
        with pytest.raises(UsageError):
            Recipe.model_validate(settings)
