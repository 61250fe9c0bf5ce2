"""Regular expressions of configs: the answers of `re`, in bounded time, whoever wrote them."""

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantforge.errors import SourceError
from quantforge.readers import _expressions, load_reader
from quantforge.readers._expressions import fits

SITE = "model.layers.0.self_attn.q_proj"
LONG = "model.layers.0." + "a" * 45
HOSTILE = {  # each takes `re` longer than anyone waits
    r".*(a+)+$": True,
    r".*(a+)+!": False,
    r"model\.layers\.0\.(a|a)*b": False,
    r"(.*)*(.*)*(.*)*(.*)*!": False,
    r".*.*.*.*.*.*.*.*.*.*.*.*!": False,
    r"model\.layers\.0\." + "a?" * 45 + "a" * 45: True,
    r"model\.layers\.0\.(a?){45}a{46}": False,
    r"(?:){4294967290}model\.": True,
    r"(?:^|){999999999}x": False,
    r"((((.*)*)*)*)*!": False,
    r"(?!.*(a|aa)+!).*\.0\.": True,
    r"(?i:.*(A+)+$)": True,
    r"(?s:.)*(\w|[a-z])*\W$": False,
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("expression", HOSTILE)
def test_expressions_with_more_paths_than_can_be_tried_are_matched_all_the_same(expression: str) -> None:
    assert fits(expression, LONG, "dynamic") is HOSTILE[expression]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("expression", "name"),
    [
        (r"(.*)(.*)*\1!", LONG),  # needs what a group has matched
        (r"(?<!x)(a+)+.*(a+)+!", "a" * 60),  # looks back
        ("(" * 30 + "a" + ")+" * 30 + ".*" * 400 + "!", "a" * 900),
        (r"(a+)+!", "a" * 2000),
    ],
)
def test_what_cannot_be_matched_in_bounded_time_is_refused_with_the_expression(expression: str, name: str) -> None:
    with pytest.raises(SourceError, match="cannot be matched in bounded time") as refusal:
        fits(expression, name, "dynamic")
    assert "quantization_config: dynamic holds" in str(refusal.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("gptq", {"bits": 4, "group_size": 32, "sym": True, "dynamic": {"-:(.*)*(.*)*(.*)*!": {}}}),
        ("awq", {"bits": 4, "group_size": 32, "zero_point": True, "dynamic": {"+:(.*)*(.*)*(.*)*!": {"bits": 8}}}),
        ("auto-round", {"bits": 4, "group_size": 32, "sym": True, "extra_config": {"(.*)*(.*)*(.*)*!": {"bits": 8}}}),
    ],
)
def test_readers_answer_for_configs_with_hostile_expressions(method: str, config: dict[str, Any]) -> None:
    scheme = load_reader(method).scheme(config, LONG)
    assert (scheme.bits, scheme.group_size) == (4, 32)


@pytest.mark.timeout(60)
def test_compressed_tensors_ignores_and_targets_may_be_hostile_too() -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    config = {
        "format": "pack-quantized",
        "ignore": ["re:(.*)*(.*)*(.*)*!"],
        "config_groups": {"group_0": {"targets": [r"re:.*(a+)+$"], "weights": weights}},
    }
    assert load_reader("compressed-tensors").scheme(config, LONG).bits == 4


# --------------------------------------------------------------------------------------------- the answers of `re`

ATOMS = st.sampled_from(
    ["a", "b", r"\.", ".", "[ab]", "[^a.]", r"\w", r"\d", "^", "$", r"\b", "0", "(?=a)", "(?!b)", "(?:)", "(?i:A)"]
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}?"])).map(
            lambda part: f"(?:{part[0]}){part[1]}"
        ),
        inner.map(lambda part: f"(?={part})"),
        inner.map(lambda part: f"(?!{part})"),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, st.text("ab.0", max_size=6), st.booleans())
@example("(a|ab)(b|)$", "ab", True)
@example("(?:a|b)*?b", "aab", False)
@example(r".*\.0\.", "a.0.b", True)
def test_following_all_paths_gives_the_answer_of_re(expression: str, name: str, whole: bool) -> None:
    expected = (re.fullmatch if whole else re.match)(expression, name) is not None
    assert _expressions.walked(expression, name, whole) is expected


@pytest.mark.parametrize(
    ("expression", "whole", "expected"),
    [
        (r"model\.layers\.0\.", False, True),
        (r"model\.layers\.0\.", True, False),
        (r".*self_attn\.(q|k|v)_proj$", False, True),
        (r"layers", False, False),
        (r"(?P<part>.*)_(?:proj)", True, True),
        (r"(model)\..*(?<=q_)proj", True, True),
    ],
)
def test_ordinary_expressions_are_left_to_re(expression: str, whole: bool, expected: bool) -> None:
    assert _expressions.paths(expression, len(SITE)) * len(SITE) < _expressions.MOST_EFFORT
    assert fits(expression, SITE, "ignore", whole=whole) is expected


@pytest.mark.parametrize("expression", ["(", "a{99999999999999999999}", "[z-a]", "(?P<a>b)(?P<a>c)", "*"])
def test_what_is_no_expression_is_said_with_where_it_stands(expression: str) -> None:
    with pytest.raises(SourceError, match=r"quantization_config: ignore holds .*, not a regular expression: "):
        fits(expression, SITE, "ignore")
