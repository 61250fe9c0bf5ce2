"""GPTQ: identities that hold exactly in float64, and every way the gram can be bad."""

import logging

import pytest
import torch
from torch import Tensor

from quantforge.errors import CalibrationError, NumericsError
from quantforge.methods import OptionValue, Solution, WeightProblem, gptq, rtn
from quantforge.numerics.gram import GramAccumulator
from quantforge.numerics.grid import choose_codes, minmax_grid
from quantforge.numerics.metrics import proxy_loss
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec

IN, OUT = 48, 12
SPECS = [
    QuantSpec(bits, group_size, symmetric)
    for bits in (2, 3, 4, 8)
    for group_size in (16, None)
    for symmetric in (True, False)
]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=QuantSpec.label)
each_order = pytest.mark.parametrize("act_order", [True, False], ids=["act-order", "in-order"])


def random_weight(out_features: int = OUT, in_features: int = IN) -> Tensor:
    return torch.randn(out_features, in_features, dtype=torch.float64)


def random_gram(in_features: int = IN, tokens: int = 256, spread: float = 3.0) -> Tensor:
    """Correlated inputs whose scales differ by up to e^spread; ill-conditioned for a large spread or few tokens."""
    mixing = torch.randn(in_features, in_features, dtype=torch.float64)
    scales = (torch.rand(in_features, dtype=torch.float64) * spread).exp()
    x = torch.randn(tokens, in_features, dtype=torch.float64) @ mixing * scales
    return x.t() @ x / tokens


def problem(weight: Tensor, gram: Tensor | None, spec: QuantSpec, **options: OptionValue) -> WeightProblem:
    return WeightProblem("layers.0.mlp.up_proj", weight, spec, gram, 256, gptq.METHOD.resolve(options))


def solve(weight: Tensor, gram: Tensor, spec: QuantSpec, **options: OptionValue) -> Solution:
    return gptq.solve(problem(weight, gram, spec, **options))


def unguarded(weight: Tensor, gram: Tensor, spec: QuantSpec, **options: OptionValue) -> Tensor:
    """Codes of the column loop on the min-max grid, no row replaced."""
    return on_grid(weight, gram, *minmax_grid(weight, spec), spec, gptq.METHOD.resolve(options))[0]


def on_grid(
    weight: Tensor, gram: Tensor, scale: Tensor, zero: Tensor, spec: QuantSpec, options: dict[str, OptionValue]
) -> tuple[Tensor, gptq.Order]:
    order = gptq.visiting_order(gram, options)
    assert order.factor.feedback is not None
    block_size = int(options["block_size"])
    return gptq.round_columns(weight, order.factor.feedback, order.columns, scale, zero, spec, block_size), order


def nearest(weight: Tensor, spec: QuantSpec) -> Tensor:
    return choose_codes(weight, *minmax_grid(weight, spec), spec)


def loss_of(solution: Solution, weight: Tensor, gram: Tensor) -> Tensor:
    return proxy_loss(weight.double(), solution.quantized.dequantize(), gram.double())


def brute_force_obq(weight: Tensor, gram: Tensor, spec: QuantSpec, damping: float, order: list[int]) -> Tensor:
    """OBQ in a fixed order as its paper states it, inverting the gram of the columns that are left at every step."""
    scale, zero = minmax_grid(weight, spec)
    width = weight.shape[1] // scale.shape[1]
    damped = gram + damping * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    rest, codes = weight.clone(), torch.empty(weight.shape, dtype=torch.uint8)
    for step, column in enumerate(order):
        left = order[step:]
        inverse = torch.linalg.inv(damped[left][:, left])
        s, z = scale[:, column // width].double(), zero[:, column // width].double()
        code = (rest[:, column] / s).round().add(z).clamp(0, spec.code_max)
        error = (rest[:, column] - (code - z) * s) / inverse[0, 0]
        rest[:, left] -= error.unsqueeze(1) * inverse[0]
        codes[:, column] = code.to(torch.uint8)
    return codes


# ------------------------------------------------------------------------------------------------ exact identities


@each_spec
@each_order
def test_codes_equal_brute_force_obq(spec: QuantSpec, act_order: bool) -> None:
    weight, gram = random_weight(), random_gram()
    order = sorted(range(IN), key=lambda i: -float(gram[i, i])) if act_order else list(range(IN))
    expected = brute_force_obq(weight, gram, spec, 0.01, order)
    assert torch.equal(unguarded(weight, gram, spec, act_order=act_order), expected)
    assert not torch.equal(expected, nearest(weight, spec))


@each_spec
@each_order
def test_codes_do_not_depend_on_the_block_size(spec: QuantSpec, act_order: bool) -> None:
    weight, gram = random_weight(), random_gram()
    expected = unguarded(weight, gram, spec, act_order=act_order, block_size=1)
    for block_size in (5, 16, 32, IN, 1000):
        assert torch.equal(unguarded(weight, gram, spec, act_order=act_order, block_size=block_size), expected)


@each_spec
@each_order
def test_uncorrelated_inputs_give_round_to_nearest(spec: QuantSpec, act_order: bool) -> None:
    weight = random_weight()
    for diagonal in (torch.ones(IN), torch.rand(IN) + 0.1):
        codes = unguarded(weight, diagonal.double().diag(), spec, act_order=act_order)
        assert torch.equal(codes, nearest(weight, spec))


@each_spec
def test_scaling_the_gram_changes_nothing(spec: QuantSpec) -> None:
    weight, gram = random_weight(), random_gram()
    expected = solve(weight, gram, spec).quantized.codes
    for factor in (7.3, 1e-12, 1e12):
        assert torch.equal(solve(weight, factor * gram, spec).quantized.codes, expected)


@each_spec
@each_order
def test_weights_on_the_grid_come_back_unchanged(spec: QuantSpec, act_order: bool) -> None:
    scale, zero = minmax_grid(random_weight(), spec)
    codes = torch.randint(0, spec.code_max + 1, (OUT, IN), dtype=torch.uint8)
    width = IN // scale.shape[1]
    weight = (codes.double() - zero.double().repeat_interleave(width, 1)) * scale.double().repeat_interleave(width, 1)
    options = gptq.METHOD.resolve({"act_order": act_order})
    found, _ = on_grid(weight, random_gram(), scale, zero, spec, options)
    assert torch.equal(found, codes)


@each_spec
def test_solving_rows_apart_equals_solving_them_stacked(spec: QuantSpec) -> None:
    weight, gram = random_weight(), random_gram()
    whole = solve(weight, gram, spec).quantized
    for start, stop in ((0, 1), (1, 7), (7, OUT)):
        part = solve(weight[start:stop], gram, spec).quantized
        assert torch.equal(part.codes, whole.codes[start:stop])
        assert torch.equal(part.scale, whole.scale[start:stop])


def test_permuting_inputs_permutes_the_codes_when_active_inputs_go_first() -> None:
    weight, gram = random_weight(), random_gram()
    spec, permutation = QuantSpec(4, None), torch.randperm(IN)
    moved = unguarded(weight[:, permutation], gram[permutation][:, permutation], spec)
    assert torch.equal(moved, unguarded(weight, gram, spec)[:, permutation])


def test_float32_finds_almost_all_codes_of_float64() -> None:
    weight, gram = random_weight(64, 192), random_gram(192)
    spec = QuantSpec(4, 64)
    single = unguarded(weight.float(), gram.float(), spec)
    assert float((single != unguarded(weight.float().double(), gram, spec)).double().mean()) < 0.005


# ------------------------------------------------------------------------------------------------ the promise


@each_spec
@each_order
@pytest.mark.parametrize(("tokens", "spread"), [(256, 3.0), (256, 12.0), (20, 3.0)], ids=["good", "spread", "few"])
def test_no_row_has_a_larger_proxy_loss_than_round_to_nearest(
    spec: QuantSpec, act_order: bool, tokens: int, spread: float
) -> None:
    weight, gram = random_weight(), random_gram(tokens=tokens, spread=spread)
    solution = solve(weight, gram, spec, act_order=act_order)
    baseline = loss_of(rtn.solve(WeightProblem("site", weight, spec, None, 0, {"grid": "minmax"})), weight, gram)
    losses = loss_of(solution, weight, gram)
    assert solution.fallback is None
    assert bool((losses <= baseline * (1 + 1e-12)).all())
    assert float(losses.sum()) < float(baseline.sum())


def test_correcting_at_least_halves_the_loss_on_correlated_inputs() -> None:
    weight, gram = random_weight(64, 128), random_gram(128, tokens=1024, spread=1.0)
    spec = QuantSpec(4, 32)
    baseline = loss_of(rtn.solve(WeightProblem("site", weight, spec, None, 0, {"grid": "minmax"})), weight, gram).sum()
    assert float(loss_of(solve(weight, gram, spec), weight, gram).sum()) < 0.5 * float(baseline)


def test_a_row_on_which_correcting_lost_keeps_round_to_nearest() -> None:
    weight, gram = random_weight(200, 16), random_gram(16, spread=1.0)
    spec = QuantSpec(2, None)
    free, plain = unguarded(weight, gram, spec), nearest(weight, spec)
    kept = solve(weight, gram, spec, grid="minmax", sweeps=0).quantized.codes
    from_rtn, from_gptq = (kept == plain).all(1), (kept == free).all(1)
    assert bool((from_rtn | from_gptq).all())
    assert int((from_rtn & ~from_gptq).sum()) > 0
    assert int((from_gptq & ~from_rtn).sum()) > 100


# ------------------------------------------------------------------------------------------------ weighted tokens


def weighted_gram(x: Tensor, weights: Tensor) -> Tensor:
    accumulator = GramAccumulator(x.shape[1], "site")
    accumulator.add(x, weights)
    return accumulator.mean()


def tokens_and_weights(tokens: int = 256, in_features: int = IN) -> tuple[Tensor, Tensor]:
    """Correlated inputs, and weights over many orders of magnitude, some of them zero, as gradients are."""
    x = torch.randn(tokens, in_features, dtype=torch.float64)
    x = x @ torch.randn(in_features, in_features, dtype=torch.float64)
    weights = (3 * torch.randn(tokens, dtype=torch.float64)).exp() * 1e-9
    weights[::5] = 0
    return x, weights


@each_spec
def test_with_weighted_tokens_no_row_loses_more_than_round_to_nearest(spec: QuantSpec) -> None:
    for tokens in (256, 30):
        weight = random_weight()
        gram = weighted_gram(*tokens_and_weights(tokens))
        solution = solve(weight, gram, spec)
        baseline = loss_of(rtn.solve(WeightProblem("site", weight, spec, None, 0, {"grid": "minmax"})), weight, gram)
        losses = loss_of(solution, weight, gram)
        assert solution.fallback is None
        assert bool((losses <= baseline * (1 + 1e-12)).all()) and float(losses.sum()) < float(baseline.sum())


@each_spec
def test_weights_in_another_unit_change_nothing_even_in_float32(spec: QuantSpec) -> None:
    x, weights = (tensor.float() for tensor in tokens_and_weights())
    weight = random_weight().float()
    expected = solve(weight, weighted_gram(x, weights), spec).quantized
    for factor in (2.0**-40, 2.0**40):  # powers of two, so that even roundings stay the same
        found = solve(weight, weighted_gram(x, factor * weights), spec).quantized
        assert torch.equal(found.codes, expected.codes) and torch.equal(found.scale, expected.scale)
        assert torch.equal(found.zero, expected.zero)


@each_spec
def test_weighted_tokens_of_one_active_input_each_give_round_to_nearest(spec: QuantSpec) -> None:
    weight = random_weight()
    x = torch.eye(IN, dtype=torch.float64).repeat(3, 1)
    gram = weighted_gram(x, torch.rand(3 * IN, dtype=torch.float64) + 0.01)
    assert torch.equal(solve(weight, gram, spec, grid="minmax").quantized.codes, nearest(weight, spec))


@pytest.mark.parametrize("grid", ["minmax", "search"])
def test_what_is_solved_for_weighted_tokens_is_better_on_them_than_what_is_solved_for_plain_ones(grid: str) -> None:
    spec, weight = QuantSpec(3, 16), random_weight(64)
    x, weights = tokens_and_weights(1024)
    plain, weighted = weighted_gram(x, torch.ones(1024)), weighted_gram(x, weights)
    losses = {
        (name, judged): float(loss_of(solve(weight, gram, spec, grid=grid), weight, judge).sum())
        for name, gram in (("plain", plain), ("weighted", weighted))
        for judged, judge in (("plain", plain), ("weighted", weighted))
    }
    assert losses["weighted", "weighted"] < 0.9 * losses["plain", "weighted"]
    assert losses["plain", "plain"] < 0.9 * losses["weighted", "plain"]


# ------------------------------------------------------------------------------------------------ bad grams


def test_too_few_tokens_raise_the_damping_and_say_so() -> None:
    x = torch.randn(8, 256)
    weight, gram = torch.randn(16, 256), x.t() @ x / 8
    solution = solve(weight, gram, QuantSpec(4, 128), damping=0.0)
    assert solution.fallback is None
    assert solution.damping_steps >= 1
    assert solution.damping == pytest.approx(1e-6 * 10 ** (solution.damping_steps - 1), rel=1e-9)
    baseline = loss_of(
        rtn.solve(WeightProblem("site", weight, QuantSpec(4, 128), None, 0, {"grid": "minmax"})), weight, gram
    ).sum()
    assert float(loss_of(solution, weight, gram).sum()) < float(baseline)


def test_sufficient_damping_is_used_as_given() -> None:
    x = torch.randn(8, 256)
    solution = solve(torch.randn(16, 256), x.t() @ x / 8, QuantSpec(4, 128))
    assert (solution.damping, solution.damping_steps, solution.dead_inputs) == (0.01, 0, 0)


def test_damping_grows_tenfold_until_the_gram_is_positive_definite() -> None:
    gram = torch.tensor([[1.0, 1.05], [1.05, 1.0]], dtype=torch.float64)  # smallest eigenvalue -0.05
    for damping, used, steps in ((0.01, 0.1, 1), (0.0, 0.1, 6), (0.04, 0.4, 1), (0.06, 0.06, 0)):
        solution = solve(random_weight(4, 2), gram, QuantSpec(4, None), damping=damping)
        assert (solution.damping, solution.damping_steps, solution.fallback) == (used, steps, None)


def test_gram_beyond_repair_falls_back_to_round_to_nearest_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    gram = torch.full((4, 4), -1.0, dtype=torch.float64)
    gram.diagonal().fill_(1.0)  # smallest eigenvalue -2
    weight, spec = random_weight(8, 4), QuantSpec(4, None)
    with caplog.at_level(logging.DEBUG):
        solution = solve(weight, gram, spec)
    assert solution.fallback is not None
    assert "256 tokens is not positive definite even at damping 1 (diagonal 1 to 1)" in solution.fallback
    assert (solution.damping, solution.damping_steps) == (None, 2)
    assert torch.equal(solution.quantized.codes, nearest(weight, spec))


@each_order
def test_dead_inputs_are_rounded_to_nearest_and_correct_nothing(act_order: bool) -> None:
    weight, gram, spec = random_weight(), random_gram(), QuantSpec(4, 16)
    dead = torch.zeros(IN, dtype=torch.bool)
    dead[[0, 5, 20, IN - 1]] = True
    gram[dead], gram[:, dead] = 0, 0
    options: dict[str, OptionValue] = {"act_order": act_order, "damping": 0.0}
    scale, zero = minmax_grid(weight, spec)
    codes, order = on_grid(weight, gram, scale, zero, spec, gptq.METHOD.resolve(options))
    assert order.dead_inputs == 4
    assert (order.factor.damping, order.factor.damping_steps) == (0.0, 0)
    assert torch.equal(codes[:, dead], nearest(weight, spec)[:, dead])
    disturbed = weight.clone()
    disturbed[:, dead] += 0.3 * torch.rand(OUT, 4, dtype=torch.float64)
    again, _ = on_grid(disturbed, gram, scale, zero, spec, gptq.METHOD.resolve(options))
    assert torch.equal(again[:, ~dead], codes[:, ~dead])
    assert solve(weight, gram, spec).dead_inputs == 4


def test_zero_on_a_diagonal_gram_gives_what_a_healthy_diagonal_gives() -> None:
    weight, gram = torch.ones(4, 4), torch.eye(4)
    gram[2, 2] = 0
    spec = QuantSpec(4, None)
    healthy = solve(weight, torch.eye(4), spec).quantized
    assert torch.equal(solve(weight, gram, spec).quantized.dequantize(), healthy.dequantize())


def test_site_that_saw_only_zeros_is_rounded_to_nearest_without_raising_damping() -> None:
    weight, spec = random_weight(), QuantSpec(4, 16)
    solution = solve(weight, torch.zeros(IN, IN, dtype=torch.float64), spec)
    assert torch.equal(solution.quantized.codes, nearest(weight, spec))
    assert (solution.dead_inputs, solution.damping_steps, solution.fallback) == (IN, 0, None)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_weight_or_gram_that_is_not_finite_is_refused_by_name(poison: float) -> None:
    weight, gram, spec = random_weight(), random_gram(), QuantSpec(4, 16)
    bad_weight, bad_gram = weight.clone(), gram.clone()
    bad_weight[3, 4] = poison
    bad_gram[3, 4] = poison
    with pytest.raises(NumericsError, match=r"layers\.0\.mlp\.up_proj: 1 of 576 weights are not finite"):
        solve(bad_weight, gram, spec)
    with pytest.raises(NumericsError, match=r"layers\.0\.mlp\.up_proj: 1 of 2304 gram entries are not finite"):
        solve(weight, bad_gram, spec)


@pytest.mark.parametrize("gram", [None, torch.eye(IN - 1)], ids=["missing", "wrong shape"])
def test_missing_or_misshapen_gram_is_refused_by_name(gram: Tensor | None) -> None:
    with pytest.raises(CalibrationError, match=r"layers\.0\.mlp\.up_proj: gptq needs a gram of shape \(48, 48\)"):
        gptq.solve(problem(random_weight(), gram, QuantSpec(4, 16)))


# ------------------------------------------------------------------------------------------------ good behaviour


@each_spec
@each_order
def test_all_zero_and_tiny_groups_come_back_small_and_finite(spec: QuantSpec, act_order: bool) -> None:
    weight, gram = random_weight().float(), random_gram().float()
    weight[0], weight[1] = 0.0, weight[1] * 1e-7
    weight[2, :16] = 0.0
    dequantized = solve(weight, gram, spec, act_order=act_order).quantized.dequantize()
    assert torch.equal(dequantized[0], torch.zeros(IN))
    assert float(dequantized[1].abs().max()) <= 1e-6
    if spec.group_size == 16:
        assert torch.equal(dequantized[2, :16], torch.zeros(16))


def test_solving_changes_no_input_and_no_random_state() -> None:
    weight, gram = random_weight().requires_grad_(), random_gram()
    gram[3], gram[:, 3] = 0, 0
    before, state = (weight.detach().clone(), gram.clone()), torch.random.get_rng_state()
    first, second = solve(weight, gram, QuantSpec(4, 16)), solve(weight, gram, QuantSpec(4, 16))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(weight, before[0])
    assert torch.equal(gram, before[1])
    assert torch.equal(first.quantized.codes, second.quantized.codes)
    assert first.quantized.codes.is_contiguous()


@each_order
def test_the_loss_is_the_sum_of_each_columns_own_rounding_error_times_its_importance(act_order: bool) -> None:
    weight, gram, spec = random_weight(), random_gram(), QuantSpec(3, 16)
    options = gptq.METHOD.resolve({"act_order": act_order, "damping": 0.0})
    codes, order = on_grid(weight, gram, *minmax_grid(weight, spec), spec, options)
    quantized = QuantizedWeight(spec, codes, *minmax_grid(weight, spec)).dequantize().double()
    assert order.factor.feedback is not None
    missed = (weight - quantized)[:, order.columns]  # w - q, in the order of the visits
    own = missed + missed @ order.factor.feedback  # what each column was asked to be, less what it became
    importance = order.importance()[order.columns]
    assert torch.allclose((own.square() * importance).sum(1), proxy_loss(weight, quantized, gram), rtol=1e-9)
