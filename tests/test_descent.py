"""Coordinate descent over codes, against brute force and against itself."""

import itertools

import pytest
import torch
from torch import Tensor

from quantforge.numerics.descent import BLOCK, refine_codes
from quantforge.numerics.grid import choose_codes, minmax_grid, searched_grid
from quantforge.numerics.metrics import proxy_loss
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec

SPECS = [QuantSpec(2, 8), QuantSpec(3, 16, symmetric=False), QuantSpec(4, None), QuantSpec(4, 8)]


def problem(in_features: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(in_features)
    inputs = torch.randn(3 * in_features, in_features, generator=generator, dtype=torch.float64)
    inputs[:, 1:] += 0.8 * inputs[:, :-1]
    weight = torch.randn(rows, in_features, generator=generator, dtype=torch.float64)
    return weight, inputs.t() @ inputs / len(inputs)


def rounded(weight: Tensor, spec: QuantSpec) -> QuantizedWeight:
    scale, zero = searched_grid(weight, spec, torch.ones(weight.shape[1]))
    return QuantizedWeight(spec, choose_codes(weight, scale, zero, spec), scale, zero)


@pytest.mark.parametrize("spec", SPECS, ids=QuantSpec.label)
@pytest.mark.parametrize("in_features", [16, BLOCK + 16, 3 * BLOCK])
def test_no_row_gets_worse_and_the_end_is_a_local_minimum_by_brute_force(spec: QuantSpec, in_features: int) -> None:
    weight, gram = problem(in_features)
    start = rounded(weight, spec)
    end = refine_codes(weight, start, gram, 50)
    before, after = (proxy_loss(weight, one.dequantize(), gram) for one in (start, end))
    assert bool((after <= before * (1 + 1e-12)).all()) and float(after.sum()) < float(before.sum())
    assert torch.equal(end.scale, start.scale) and torch.equal(end.zero, start.zero)
    for row, column in itertools.product(range(0, 12, 5), range(0, in_features, 7)):
        for step in (-1, 1):
            code = int(end.codes[row, column]) + step
            if 0 <= code <= spec.code_max:
                codes = end.codes.clone()
                codes[row, column] = code
                other = QuantizedWeight(spec, codes, end.scale, end.zero)
                assert float(proxy_loss(weight, other.dequantize(), gram)[row]) >= float(after[row]) * (1 - 1e-9)


def test_a_sweep_is_what_visiting_one_weight_after_the_other_gives() -> None:
    weight, gram = problem(BLOCK + 8, rows=3)
    spec = QuantSpec(3, 8)
    start = rounded(weight, spec)
    codes = start.codes.clone()
    for row in range(3):
        for column in range(BLOCK + 8):
            losses = []
            for code in range(spec.code_max + 1):
                codes[row, column] = code
                tried = QuantizedWeight(spec, codes, start.scale, start.zero).dequantize()
                losses.append(float(proxy_loss(weight, tried, gram)[row]))
            codes[row, column] = losses.index(min(losses))
    assert torch.equal(refine_codes(weight, start, gram, 1).codes, codes)


def test_with_uncorrelated_inputs_the_nearest_codes_stay() -> None:
    weight, _ = problem(32)
    spec = QuantSpec(4, 8)
    scale, zero = minmax_grid(weight, spec)
    start = QuantizedWeight(spec, choose_codes(weight, scale, zero, spec), scale, zero)
    assert torch.equal(refine_codes(weight, start, torch.diag(torch.rand(32).double() + 0.1), 3).codes, start.codes)


def test_a_group_of_zeros_stays_zero() -> None:
    weight, gram = problem(32)
    weight[:, 8:16] = 0
    end = refine_codes(weight, rounded(weight, QuantSpec(4, 8)), gram, 5)
    assert not bool(end.dequantize()[:, 8:16].any())
