"""Scales fitted to codes: the optimum, and never a worse row."""

import pytest
import torch

from quantforge.numerics.metrics import proxy_loss
from quantforge.numerics.refit import refit_scales
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec
from tests.test_descent import problem, rounded

SPECS = [QuantSpec(2, 8), QuantSpec(3, 16, symmetric=False), QuantSpec(4, None), QuantSpec(4, 8)]


@pytest.mark.parametrize("spec", SPECS, ids=QuantSpec.label)
def test_no_row_gets_worse_and_most_get_better(spec: QuantSpec) -> None:
    weight, gram = problem(48, rows=40)
    start = rounded(weight, spec)
    end = refit_scales(weight, start, gram)
    before, after = (proxy_loss(weight, one.dequantize(), gram) for one in (start, end))
    assert bool((after <= before).all())
    assert int((after < before).sum()) > 20
    assert torch.equal(end.codes, start.codes) and torch.equal(end.zero, start.zero)


def test_scales_that_were_moved_away_come_back_to_the_weights_own() -> None:
    weight, gram = problem(48, rows=40)
    exact = rounded(weight, QuantSpec(4, 8, scale_dtype="float16"))
    moved = QuantizedWeight(exact.spec, exact.codes, exact.scale * 1.1, exact.zero)
    target = exact.dequantize().double()
    end = refit_scales(target, moved, gram)
    assert float((end.scale.double() / exact.scale.double() - 1).abs().max()) < 2e-3  # the ridge, and float16
    ratio = proxy_loss(target, end.dequantize(), gram) / proxy_loss(target, moved.dequantize(), gram)
    assert float(ratio.max()) < 1e-3


def test_the_fit_agrees_with_least_squares_over_explicit_inputs() -> None:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(500, 32, generator=generator, dtype=torch.float64)
    inputs[:, 1:] += inputs[:, :-1]
    weight = torch.randn(6, 32, generator=generator, dtype=torch.float64)
    start = rounded(weight, QuantSpec(3, 8, scale_dtype="float16"))
    end = refit_scales(weight, start, inputs.t() @ inputs / 500)
    for row in range(6):
        offsets = (start.codes[row].double() - start.zero[row].double().repeat_interleave(8)).reshape(4, 8)
        design = torch.stack([inputs[:, 8 * g : 8 * g + 8] @ offsets[g] for g in range(4)], dim=1)
        best = torch.linalg.lstsq(design, inputs @ weight[row]).solution
        assert torch.allclose(end.scale[row].double(), best, rtol=5e-3)
