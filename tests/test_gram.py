"""The mean outer product of a site's inputs, and the losses measured with it."""

import pytest
import torch

from quantforge.errors import CalibrationError, NumericsError
from quantforge.numerics.gram import GramAccumulator
from quantforge.numerics.metrics import all_finite, proxy_loss, relative_proxy_loss


@pytest.mark.parametrize("in_features", [1, 7, 128, 255, 256, 300, 512, 600])
def test_gram_equals_the_plain_product_at_any_width(in_features: int) -> None:
    x = torch.randn(3, 50, in_features, dtype=torch.float64)
    accumulator = GramAccumulator(in_features, "site")
    accumulator.add(x)
    rows = x.reshape(-1, in_features)
    assert accumulator.tokens == 150
    assert torch.allclose(accumulator.mean(), rows.t() @ rows / 150, rtol=1e-13, atol=1e-13)


def test_gram_is_exactly_symmetric() -> None:
    accumulator = GramAccumulator(520, "site")
    accumulator.add(torch.randn(1000, 520))
    gram = accumulator.mean()
    assert torch.equal(gram, gram.t())


def test_whole_number_inputs_give_the_exact_gram_however_they_are_batched() -> None:
    x = torch.randint(-8, 9, (96, 384)).float()
    whole, parts = GramAccumulator(384, "whole"), GramAccumulator(384, "parts")
    whole.add(x)
    for start, stop in ((0, 1), (1, 31), (31, 31), (31, 96)):
        parts.add(x[start:stop].unsqueeze(0))
    expected = (x.long().t() @ x.long()).float() / 96
    assert torch.equal(whole.mean(), expected)
    assert torch.equal(parts.mean(), expected)
    assert parts.tokens == 96


@pytest.mark.parametrize(
    ("given", "kept"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_half_precision_inputs_are_summed_in_float32_and_doubles_in_float64(
    given: torch.dtype, kept: torch.dtype
) -> None:
    x = torch.randn(64, 256).to(given)
    accumulator = GramAccumulator(256, "site")
    accumulator.add(x)
    gram = accumulator.mean()
    assert gram.dtype == kept
    assert torch.allclose(gram.double(), x.double().t() @ x.double() / 64, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_features", [7, 128, 300])
def test_weighted_gram_equals_the_explicit_weighted_sum(in_features: int) -> None:
    x = torch.randn(3, 50, in_features, dtype=torch.float64)
    weights = torch.rand(150, dtype=torch.float64).pow(4)
    weights[::7] = 0
    accumulator = GramAccumulator(in_features, "site")
    accumulator.add(x[:2], weights[:100])
    accumulator.add(x[2:], weights[100:])
    rows = x.reshape(-1, in_features)
    expected = sum(weight * row.outer(row) for weight, row in zip(weights, rows, strict=True)) / 150
    gram = accumulator.mean()
    assert accumulator.tokens == 150, "a mean over tokens, not over their weights"
    assert torch.allclose(gram, expected, rtol=1e-12, atol=1e-13) and torch.equal(gram, gram.t())


def test_weights_of_one_change_no_bit_and_a_weight_of_four_is_a_token_seen_four_times() -> None:
    x = torch.randint(-8, 9, (24, 256)).float()
    plain, ones, fours, repeated = (GramAccumulator(256, "site") for _ in range(4))
    plain.add(x)
    ones.add(x, torch.ones(24))
    assert torch.equal(ones.mean(), plain.mean())
    fours.add(x, torch.tensor([4.0, 1.0]).repeat(12))
    repeated.add(torch.cat([x, *[x[::2]] * 3]))
    assert torch.equal((fours.mean() * 24).round(), (repeated.mean() * 60).round())  # whole numbers


def test_weighting_changes_no_input() -> None:
    x, weights = torch.randn(8, 16), torch.rand(8)
    before = x.clone(), weights.clone()
    GramAccumulator(16, "site").add(x, weights)
    assert torch.equal(x, before[0]) and torch.equal(weights, before[1])


def test_mean_is_made_in_the_memory_of_the_sums_and_hands_it_over() -> None:
    accumulator = GramAccumulator(300, "layers.3.mlp.down_proj")
    accumulator.add(torch.ones(2, 300))
    assert accumulator._total is not None
    place = accumulator._total.data_ptr()
    gram = accumulator.mean()
    assert gram.data_ptr() == place and torch.equal(gram, torch.ones(300, 300))
    assert accumulator._total is None and accumulator.tokens == 2


def test_mean_ends_the_summing() -> None:
    accumulator = GramAccumulator(2, "layers.3.mlp.down_proj")
    accumulator.add(torch.tensor([[1.0, 2.0]]))
    assert accumulator.mean().tolist() == [[1, 2], [2, 4]]
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.down_proj: the mean was taken"):
        accumulator.mean()
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.down_proj: the mean was taken"):
        accumulator.add(torch.tensor([[3.0, 0.0]]))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_input_that_is_not_finite_is_refused_by_site_and_feature(poison: float) -> None:
    accumulator = GramAccumulator(300, "layers.3.mlp.down_proj")
    x = torch.randn(20, 300)
    x[11, 271] = poison
    accumulator.add(x)
    accumulator.add(torch.randn(20, 300))
    with pytest.raises(NumericsError, match=r"layers\.3\.mlp\.down_proj: .* in 1 of 300 features, first \[271\]"):
        accumulator.mean()


def test_site_without_a_token_has_no_statistics() -> None:
    accumulator = GramAccumulator(4, "experts.5")
    with pytest.raises(CalibrationError, match=r"experts\.5"):
        accumulator.mean()
    accumulator.add(torch.zeros(0, 4))
    with pytest.raises(CalibrationError, match=r"experts\.5"):
        accumulator.mean()


def test_inputs_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"site: inputs \(2, 3\) must end in 4 features"):
        GramAccumulator(4, "site").add(torch.zeros(2, 3))


def test_accumulating_changes_neither_input_nor_autograd() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    before = x.detach().clone()
    accumulator = GramAccumulator(16, "site")
    accumulator.add(x)
    assert not accumulator.mean().requires_grad
    assert torch.equal(x, before)


def test_proxy_loss_is_the_mean_squared_output_error_of_each_row() -> None:
    x = torch.randn(200, 24, dtype=torch.float64)
    weight, other = torch.randn(6, 24, dtype=torch.float64), torch.randn(6, 24, dtype=torch.float64)
    error, output = x @ (weight - other).t(), x @ weight.t()
    gram = x.t() @ x / 200
    assert torch.allclose(proxy_loss(weight, other, gram), error.square().mean(0), rtol=1e-12)
    ratio = float(error.square().sum() / output.square().sum())
    assert relative_proxy_loss(weight, other, gram) == pytest.approx(ratio, rel=1e-12)


def test_relative_loss_of_a_site_that_outputs_nothing_is_zero() -> None:
    assert relative_proxy_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.eye(3)) == 0.0


@pytest.mark.parametrize(
    ("values", "finite"),
    [([1.0, -3e38], True), ([], True), ([0.0, float("nan")], False), ([float("-inf")], False), ([float("inf")], False)],
)
def test_all_finite_sees_nan_and_both_infinities(values: list[float], finite: bool) -> None:
    assert all_finite(torch.tensor(values)) is finite
