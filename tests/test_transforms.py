"""Scales of AWQ and SmoothQuant: the errors they are chosen by are real output errors, and odd channels do no harm."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantforge.errors import CalibrationError, UsageError
from quantforge.model.observe import InputGroup
from quantforge.numerics.activations import quantize_tokens
from quantforge.numerics.channels import MagnitudeAccumulator
from quantforge.numerics.grid import importance_of, nearest_on_grid
from quantforge.spec import ActivationSpec, QuantSpec
from quantforge.transforms import (
    Consumer,
    FoldProblem,
    Transform,
    load_transform,
    rounding_error,
    tidy_scale,
    tied_max,
    tied_mean,
    transform_names,
)
from quantforge.transforms.smoothquant import ALPHAS, _descend, _Expected, joint_error

IN, TOKENS = 32, 400


def inputs(outliers: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """[TOKENS, IN], correlated, the first channels 30 times as large."""
    rows = torch.randn(TOKENS, IN, dtype=dtype) @ (torch.eye(IN, dtype=dtype) + 0.1 * torch.randn(IN, IN, dtype=dtype))
    rows[:, :outliers] *= 30
    return rows


def problem(rows: Tensor, *specs: QuantSpec, **changes: Any) -> FoldProblem:
    """Consumers of 24 rows each, all reading `rows`."""
    gram = rows.t() @ rows / len(rows)
    consumers = tuple(
        Consumer(f"site{i}", torch.randn(24, IN, dtype=rows.dtype), spec, gram) for i, spec in enumerate(specs)
    )
    settings = {
        "name": "norm -> sites",
        "consumers": consumers,
        "channels": torch.arange(IN),
        "mean_abs": rows.abs().mean(0),
        "abs_max": rows.abs().amax(0),
        "rows": rows,
        "activations": ActivationSpec(8),
    }
    return FoldProblem(**(settings | changes))


# ------------------------------------------------------------------------------------------------ registry


@pytest.mark.parametrize("name", transform_names())
def test_every_file_defines_a_transform_of_its_own_name(name: str) -> None:
    found = load_transform(name)
    assert isinstance(found, Transform)
    assert found.name == name and found.summary


def test_awq_and_smoothquant_are_transforms_and_others_are_refused() -> None:
    assert {"awq", "smoothquant"} <= set(transform_names())
    with pytest.raises(UsageError, match="unknown transform 'awk'; known transforms: awq, smoothquant"):
        load_transform("awk")


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("searched", [False, True])
def test_the_error_from_the_gram_is_the_error_over_the_inputs_themselves(searched: bool) -> None:
    rows = inputs(outliers=2)
    asked = problem(rows, QuantSpec(3, 16), QuantSpec(4, 8, symmetric=False), searched=searched)
    scale = 3 ** (2 * torch.rand(IN, dtype=torch.float64) - 1)
    off = energy = 0.0
    for one in asked.consumers:
        importance = importance_of((rows / scale).square().mean(0)) if searched else None
        rounded = nearest_on_grid(one.weight * scale, one.spec, importance).dequantize().double()
        off += float(((rows / scale) @ rounded.t() - rows @ one.weight.t()).square().sum())
        energy += float((rows @ one.weight.t()).square().sum())
    assert rounding_error(asked, scale) == pytest.approx(off / energy, rel=1e-9)


def test_a_sample_of_rows_estimates_the_error_of_all() -> None:
    asked = problem(inputs(), QuantSpec(4, 16))
    ones = torch.ones(IN, dtype=torch.float64)
    assert rounding_error(asked, ones, max_rows=24) == rounding_error(asked, ones)
    assert rounding_error(asked, ones, max_rows=8) == pytest.approx(rounding_error(asked, ones), rel=0.5)


def test_the_joint_error_is_that_of_outputs_with_weights_and_inputs_rounded() -> None:
    asked = problem(inputs(outliers=2), QuantSpec(8, None))
    assert asked.rows is not None
    scale = 3 ** (2 * torch.rand(IN, dtype=torch.float64) - 1)
    (one,) = asked.consumers
    exact = asked.rows @ one.weight.t()
    weight = nearest_on_grid(one.weight * scale, one.spec).dequantize().double()
    smooth = asked.rows / scale
    step = smooth.abs().amax(1, keepdim=True) / 127.5
    off = exact - ((smooth / step).clamp(-128, 127).round() * step) @ weight.t()
    assert joint_error(asked, scale) == pytest.approx(float(off.square().sum() / exact.square().sum()), rel=1e-9)


# ------------------------------------------------------------------------------------------------ awq


@pytest.mark.parametrize(("searched", "ratio"), [(False, 0.7), (True, 1.0)])  # a search spares them by itself
def test_awq_protects_columns_that_meet_large_inputs(searched: bool, ratio: float) -> None:
    asked = problem(inputs(outliers=3), QuantSpec(4, 16), QuantSpec(4, 16), searched=searched)
    solution = load_transform("awq").solve(asked)
    ones = torch.ones(IN, dtype=torch.float64)
    assert solution.before == rounding_error(asked, ones)
    assert solution.after == rounding_error(asked, solution.scale)
    assert solution.after < ratio * solution.before
    assert solution.scale[:3].min() > solution.scale[3:].max()
    assert 0 < solution.alpha <= 1


def test_awq_returns_ones_when_no_scale_is_better_than_none() -> None:
    asked = problem(inputs(), QuantSpec(8, 8))
    weight = nearest_on_grid(asked.consumers[0].weight, QuantSpec(8, 8)).dequantize().double()
    on_grid = problem(
        inputs(), QuantSpec(8, 8), consumers=(Consumer("a", weight, QuantSpec(8, 8), torch.eye(IN).double()),)
    )
    solution = load_transform("awq").solve(on_grid)
    assert torch.equal(solution.scale, torch.ones(IN, dtype=torch.float64))
    assert (solution.alpha, solution.rule) == (0.0, "none")
    assert solution.after == solution.before


@pytest.mark.parametrize("name", ["awq", "smoothquant"])
def test_columns_of_one_channel_share_a_scale(name: str) -> None:
    channels = torch.arange(16).reshape(4, 4).repeat_interleave(2, dim=0).flatten()
    solution = load_transform(name).solve(problem(inputs(outliers=5), QuantSpec(4, 16), channels=channels))
    assert solution.alpha > 0
    for channel in range(16):
        assert solution.scale[channels == channel].unique().numel() == 1
    assert solution.scale.unique().numel() > 8


@pytest.mark.parametrize("name", ["awq", "smoothquant"])
def test_powers_of_two_are_kept_to_when_asked_for(name: str) -> None:
    solution = load_transform(name).solve(problem(inputs(outliers=3), QuantSpec(4, 16), powers_of_two=True))
    assert torch.equal(solution.scale.log2(), solution.scale.log2().round())
    assert solution.scale.unique().numel() > 1 and solution.after < solution.before


@pytest.mark.parametrize("name", ["awq", "smoothquant"])
def test_silent_inputs_and_empty_columns_keep_a_scale_of_one(name: str) -> None:
    rows = inputs(outliers=3)
    rows[:, 7] = 0
    asked = problem(rows, QuantSpec(4, 16))
    asked.consumers[0].weight[:, 9] = 0
    solution = load_transform(name).solve(asked)
    assert bool(torch.isfinite(solution.scale).all()) and float(solution.scale.min()) > 0
    assert solution.scale[7] == 1
    assert solution.after < solution.before
    if name == "smoothquant" and solution.alpha < 1:
        assert solution.scale[9] == 1


# ------------------------------------------------------------------------------------------------ smoothquant


def test_smoothquant_moves_outliers_of_the_inputs_into_the_weights() -> None:
    asked = problem(inputs(outliers=3), QuantSpec(8, None))
    solution = load_transform("smoothquant").solve(asked)
    assert solution.after == joint_error(asked, solution.scale) < 0.4 * solution.before
    assert solution.scale[:3].min() > solution.scale[3:].max()


@pytest.mark.parametrize("group_size", [None, 8])
def test_the_expected_error_is_the_formula_summed_by_hand(group_size: int | None) -> None:
    counts = torch.rand(TOKENS, dtype=torch.float64)
    rows = inputs(outliers=2)
    gram = (rows * counts[:, None]).t() @ rows / TOKENS
    asked = problem(rows, QuantSpec(8, group_size), QuantSpec(4, group_size), row_weights=counts)
    asked = replace(asked, consumers=tuple(replace(one, gram=gram) for one in asked.consumers))
    log_scale = torch.randn(IN, dtype=torch.float64)
    scale = log_scale.exp()
    wanted = 0.0
    for one in asked.consumers:
        for row, count in zip(rows, counts, strict=True):
            step = float((row / scale).abs().max()) / 127.5
            wanted += float(count) / TOKENS * step**2 / 12 * float((scale * one.weight).square().sum())
        size = group_size or IN
        for first in range(0, IN, size):
            part = slice(first, first + size)
            energy = sum(float(gram[j, j] / scale[j] ** 2) for j in range(first, first + size))
            for weights in one.weight[:, part] * scale[part]:
                wanted += (float(weights.abs().max()) / (2 ** (one.spec.bits - 1) - 0.5)) ** 2 / 12 * energy
    steps = 4 / 12  # the formula leaves 1/12 out and counts steps of max / (2^bits - 1)
    assert float(_Expected(asked)(log_scale).exp()) * steps == pytest.approx(wanted, rel=1e-9)


def test_the_descent_ends_below_every_exponent_and_wherever_it_starts() -> None:
    asked = problem(inputs(outliers=3), QuantSpec(8, None))
    expected = _Expected(asked)
    best = float(expected(load_transform("smoothquant").solve(asked).scale.log()))
    assert best < min(float(expected(expected.start(alpha))) for alpha in ALPHAS) - 0.01
    ends = [float(expected(_descend(expected, torch.randn(IN, dtype=torch.float64)))) for _ in range(3)]
    assert ends == pytest.approx([best] * 3, abs=0.02)


def test_a_token_that_does_not_count_has_no_say() -> None:
    rows = inputs()
    rows[0, 5] = 1000.0
    counts = torch.ones(TOKENS, dtype=torch.float64)
    with_it = load_transform("smoothquant").solve(problem(rows, QuantSpec(8, None), row_weights=counts)).scale
    counts[0] = 0
    gram = (rows * counts[:, None]).t() @ rows / TOKENS
    asked = problem(rows, QuantSpec(8, None), row_weights=counts)
    asked = replace(asked, consumers=tuple(replace(one, gram=gram) for one in asked.consumers))
    without = load_transform("smoothquant").solve(asked).scale
    assert with_it[5] > 4 * with_it.median() and without[5] < 2 * without.median()


def test_smoothquant_without_a_sample_of_inputs_is_an_error_that_names_the_pair() -> None:
    with pytest.raises(CalibrationError, match="norm -> sites: smoothquant needs a sample"):
        load_transform("smoothquant").solve(replace(problem(inputs(), QuantSpec(8, None)), rows=None))


@pytest.mark.parametrize("shape", [(2, 5, 64), (1, 1, 8)])
def test_inputs_are_rounded_as_compressed_tensors_does_to_the_bit(shape: tuple[int, ...]) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    rows = torch.randn(shape) * torch.rand(shape[:-1]).unsqueeze(-1)
    rows[0, 0] = 0
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(rows, args, SimpleNamespace())  # type: ignore[arg-type]
    assert torch.equal(quantize_tokens(rows, ActivationSpec(8)), fake_quantize(rows, scale, zero, args))


# ------------------------------------------------------------------------------------------------ parts


def test_tied_columns_take_the_mean_or_the_largest_of_their_channel() -> None:
    values, channels = torch.tensor([1.0, 5.0, 3.0, 7.0]), torch.tensor([0, 2, 0, 2])
    assert tied_mean(values, channels).tolist() == [2, 6, 2, 6]
    assert tied_max(values, channels).tolist() == [3, 7, 3, 7]


def test_a_tidy_scale_is_centered_bounded_and_one_where_it_was_no_number() -> None:
    scale = tidy_scale(torch.tensor([4.0, 1.0, 0.0, torch.inf, torch.nan]), False)
    assert scale.tolist() == [2.0, 0.5, 1.0, 1.0, 1.0]
    assert tidy_scale(torch.tensor([2.0**-60, 2.0**60]), False).tolist() == [2.0**-10, 2.0**10]
    assert tidy_scale(torch.zeros(3), False).tolist() == [1, 1, 1]


def test_magnitudes_gathered_in_batches_are_those_of_all_rows() -> None:
    rows = torch.randn(30, 8)
    accumulator = MagnitudeAccumulator(rows_per_batch=3)
    assert accumulator.result() is None
    counts = torch.rand(30)
    for part in (slice(0, 12), slice(12, 12), slice(12, 14), slice(14, 30)):
        accumulator.add(rows[part].unsqueeze(0), counts[part])
    found = accumulator.result()
    assert found is not None
    assert torch.allclose(found.mean_abs, rows.abs().mean(0))
    assert torch.equal(found.abs_max, rows.abs().amax(0))
    sampled = [0, 4, 8, 12, 13, 14, 19, 24]
    assert torch.equal(found.rows, rows[sampled]) and torch.equal(found.row_weights, counts[sampled])


def test_statistics_of_divided_inputs_are_those_of_the_inputs_divided() -> None:
    rows, scale = torch.randn(50, 8, dtype=torch.float64), 2 ** torch.randn(8, dtype=torch.float64)

    def group(x: Tensor) -> InputGroup:
        accumulator = MagnitudeAccumulator(4)
        accumulator.add(x)
        return InputGroup(("a", "b"), x.t() @ x / len(x), len(x), accumulator.result())

    got, wanted = group(rows).divided(scale), group(rows / scale)
    assert (got.names, got.tokens) == (wanted.names, wanted.tokens)
    assert torch.allclose(got.gram, wanted.gram)
    assert got.magnitudes is not None and wanted.magnitudes is not None
    for name in ("mean_abs", "abs_max", "rows"):
        assert torch.allclose(getattr(got.magnitudes, name), getattr(wanted.magnitudes, name))
