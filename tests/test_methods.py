"""The methods folder is the registry, and options are checked before anything runs."""

import pytest
import torch

from quantforge.errors import NumericsError, UsageError
from quantforge.methods import Method, OptionValue, WeightProblem, load_method, method_names
from quantforge.numerics.grid import choose_codes, minmax_grid
from quantforge.spec import QuantSpec


def test_rtn_and_gptq_are_methods() -> None:
    assert {"rtn", "gptq"} <= set(method_names())
    assert method_names() == sorted(method_names())


@pytest.mark.parametrize("name", method_names())
def test_every_file_defines_a_method_of_its_own_name_with_legal_defaults(name: str) -> None:
    method = load_method(name)
    assert isinstance(method, Method)
    assert method.name == name
    assert method.summary
    defaults = {key: option.default for key, option in method.options.items()}
    assert method.resolve(defaults) == method.resolve({}) == defaults
    assert all(option.help for option in method.options.values())


def test_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown method 'gtpq'; known methods: .*gptq.*rtn"):
        load_method("gtpq")


def test_gptq_needs_a_gram_and_rtn_does_not() -> None:
    assert load_method("gptq").needs_gram
    assert not load_method("rtn").needs_gram


def test_given_options_replace_defaults() -> None:
    resolved = load_method("gptq").resolve({"damping": 0.1})
    assert resolved == {
        "act_order": True, "grid": "search", "sweeps": 2, "refits": 0, "damping": 0.1, "block_size": 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "gptq",
            {"dampening": 0.1},
            "no option 'dampening'; its options are: act_order, grid, sweeps",
        ),
        ("rtn", {"damping": 0.1}, "method rtn has no option 'damping'; its options are: grid"),
        ("gptq", {"damping": -0.1}, r"gptq\.damping must lie in \[0, 1\]; got -0\.1"),
        ("gptq", {"damping": 1.5}, r"gptq\.damping must lie in"),
        ("gptq", {"damping": float("nan")}, r"gptq\.damping must lie in \[0, 1\]; got nan"),
        ("gptq", {"block_size": 0}, r"gptq\.block_size must lie in"),
        ("gptq", {"block_size": 12.5}, r"gptq\.block_size must be of type int; got 12\.5"),
        ("gptq", {"grid": "hqq"}, r"gptq\.grid must be one of minmax, mse, search; got hqq"),
        ("gptq", {"sweeps": -1}, r"gptq\.sweeps must lie in \[0, inf\]; got -1"),
        ("gptq", {"act_order": 1}, r"gptq\.act_order must be of type bool; got 1"),
        ("gptq", {"damping": True}, r"gptq\.damping must be of type float; got True"),
    ],
)
def test_wrong_option_is_refused_with_what_is_allowed(name: str, given: dict[str, OptionValue], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_method(name).resolve(given)


def test_a_whole_number_is_accepted_for_a_real_option() -> None:
    assert load_method("gptq").resolve({"damping": 1})["damping"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rtn_takes_the_nearest_codes_of_the_minmax_grid(dtype: torch.dtype) -> None:
    weight, spec = torch.randn(8, 64, dtype=dtype), QuantSpec(4, 32, symmetric=False)
    solution = load_method("rtn").solve(WeightProblem("site", weight, spec, None, 0, {}))
    scale, zero = minmax_grid(weight, spec)
    assert torch.equal(solution.quantized.codes, choose_codes(weight, scale, zero, spec))
    assert torch.equal(solution.quantized.scale, scale)
    assert torch.equal(solution.quantized.zero, zero)
    assert (solution.damping, solution.damping_steps, solution.dead_inputs, solution.fallback) == (None, 0, 0, None)


def test_rtn_refuses_a_weight_that_is_not_finite_by_name() -> None:
    weight = torch.zeros(2, 4)
    weight[1, 1] = float("nan")
    with pytest.raises(NumericsError, match=r"layers\.2\.q_proj: 1 of 8 weights are not finite"):
        load_method("rtn").solve(WeightProblem("layers.2.q_proj", weight, QuantSpec(4, None), None, 0, {}))
