"""SmoothQuant: moves the difficulty of rounding activations with outliers into the weights (arXiv 2211.10438).

The scale is ``max|x|^alpha / max|w|^(1 - alpha)`` of each channel. The paper fixes alpha; here each pair takes, of 21
values, the one with the least error of its real outputs, weights and inputs both rounded, over a sample of inputs:
what a scale for each token does to the inputs cannot be computed from their gram.
"""

import torch
from torch import Tensor

from quantforge.errors import CalibrationError
from quantforge.numerics.activations import quantize_tokens
from quantforge.numerics.grid import importance_of, nearest_on_grid
from quantforge.transforms import FoldProblem, FoldSolution, Transform, tidy_scale, tied_max

ALPHAS = tuple(step / 20 for step in range(21))


def solve(problem: FoldProblem) -> FoldSolution:
    """The best scale by the error over `rows`; raises CalibrationError when there are none."""
    if problem.rows is None or not len(problem.rows):
        raise CalibrationError(f"{problem.name}: smoothquant needs a sample of the inputs; got none")
    inputs = tied_max(problem.abs_max, problem.channels)
    weights = torch.stack([consumer.weight.abs().amax(dim=0) for consumer in problem.consumers]).amax(dim=0)
    weights = tied_max(weights, problem.channels)
    ones = torch.ones_like(inputs)
    before = joint_error(problem, ones)
    best = FoldSolution(ones, 0.0, "none", before, before)
    for alpha in ALPHAS:
        scale = torch.where(inputs > 0, inputs**alpha / weights ** (1 - alpha), 0.0)
        scale = tidy_scale(scale, problem.powers_of_two)
        error = joint_error(problem, scale)
        if error < best.after:
            best = FoldSolution(scale, alpha, "inputs and weights", before, error)
    return best


def joint_error(problem: FoldProblem, scale: Tensor) -> float:
    """``|X W^T - A(X / s) Q(W s)^T|^2 / |X W^T|^2`` over the sampled inputs X; A and Q round inputs and weights."""
    assert problem.rows is not None and problem.activations is not None
    error = energy = 0.0
    rows = problem.rows.to(scale.dtype)
    rounded_rows = quantize_tokens(rows / scale, problem.activations)
    for consumer in problem.consumers:
        importance = importance_of(consumer.gram.diagonal() / scale.square()) if problem.searched else None
        rounded = nearest_on_grid(consumer.weight * scale, consumer.spec, importance).dequantize().to(scale.dtype)
        exact = rows @ consumer.weight.t()  # [rows, out]
        error += float((exact - rounded_rows @ rounded.t()).square().sum())
        energy += float(exact.square().sum())
    return error / energy if energy else 0.0


TRANSFORM = Transform(
    name="smoothquant",
    summary="moves outliers of activations into the weights; for quantized activations (arXiv 2211.10438)",
    solve=solve,
    quantizes_inputs=True,
    needs_rows=True,
)
