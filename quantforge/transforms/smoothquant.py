"""SmoothQuant: moves the difficulty of rounding activations with outliers into the weights (arXiv 2211.10438).

The paper's scale of a channel is ``max|x|^alpha / max|w|^(1 - alpha)``, one exponent for all channels. Here a descent
starts there (with the best of 21 exponents), on the error that is to be expected of the outputs when inputs are rounded
per token and weights per row or group, each by a twelfth of its squared step:

    sum_t c_t max_j (x_tj / s_j)^2 * sum_j s_j^2 |w_j|^2   +   sum_o max_j (w_oj s_j)^2 * sum_j E[x_j^2] / s_j^2

with x the inputs, c_t how much a token counts, w the weights. It is made of sums, products and maxima of powers of the
scales, so its logarithm is convex in theirs: there is one best scale for a pair, and a descent finds it. The result is
judged by the error of real outputs, weights and inputs both rounded, over the same sample of inputs.
"""

import torch
from torch import Tensor

from quantforge.errors import CalibrationError
from quantforge.numerics.activations import quantize_tokens
from quantforge.numerics.grid import importance_of, nearest_on_grid
from quantforge.transforms import FoldProblem, FoldSolution, Transform, tidy_scale, tied_max

ALPHAS = tuple(step / 20 for step in range(21))
STEPS, RATE = 100, 0.1


def solve(problem: FoldProblem) -> FoldSolution:
    """The best scale by the expected error over `rows`; raises CalibrationError when there are none.

    `alpha` of the result is the exponent that the descent started from, or 0 when no scale is better than none.
    """
    if problem.rows is None or not len(problem.rows):
        raise CalibrationError(f"{problem.name}: smoothquant needs a sample of the inputs; got none")
    expected = _Expected(problem)
    alpha, start = min(((alpha, expected.start(alpha)) for alpha in ALPHAS), key=lambda one: float(expected(one[1])))
    scale = tidy_scale(expected.scale(_descend(expected, start)), problem.powers_of_two)
    ones = torch.ones_like(scale)
    before, after = joint_error(problem, ones), joint_error(problem, scale)
    if after < before:
        return FoldSolution(scale, alpha, "descent", before, after)
    return FoldSolution(ones, 0.0, "none", before, before)


class _Expected:
    """The logarithm of the expected error, up to a constant, as a function of log s, one value a channel."""

    def __init__(self, problem: FoldProblem) -> None:
        assert problem.rows is not None and problem.activations is not None
        self.channels = problem.channels
        self.consumers = problem.consumers
        weights = torch.cat([consumer.weight for consumer in problem.consumers])
        self.largest_input = tied_max(problem.abs_max.to(weights.dtype), problem.channels)
        self.largest_weight = tied_max(weights.abs().amax(dim=0), problem.channels)
        self.sound = (self.largest_input > 0) & (self.largest_weight > 0)  # [in]; the others are left alone
        self.rows = problem.rows.to(weights.dtype).abs() * self.sound  # [n, in]
        self.counts = _counts(problem)
        self.weight_energy = weights.square().sum(dim=0)  # [in]
        self.input_steps = 2.0**problem.activations.bits - 1

    def start(self, alpha: float) -> Tensor:
        """log s of the paper's rule, [channels]."""
        tiny = torch.finfo(self.largest_input.dtype).tiny
        columns = alpha * self.largest_input.clamp(min=tiny).log()
        columns = columns - (1 - alpha) * self.largest_weight.clamp(min=tiny).log()
        own = columns.new_zeros(int(self.channels.max()) + 1)
        own[self.channels] = columns.masked_fill(~self.sound, 0.0)
        return own

    def scale(self, log_scale: Tensor) -> Tensor:
        """s of each column, [in]; 0 where nothing is to be scaled."""
        return log_scale[self.channels].exp() * self.sound

    def __call__(self, log_scale: Tensor) -> Tensor:
        scale = log_scale[self.channels].exp()  # [in]
        steps = (self.rows / scale).square().amax(dim=1) / self.input_steps**2
        error = (self.counts * steps).mean() * (scale.square() * self.weight_energy).sum()
        for consumer in self.consumers:
            size = consumer.spec.group_size or len(scale)
            out_features = consumer.weight.shape[0]
            grouped = (consumer.weight * scale).abs().reshape(out_features, -1, size)  # [out, groups, size]
            steps = grouped.amax(dim=2).square().sum(dim=0) / (2.0**consumer.spec.bits - 1) ** 2  # [groups]
            energy = (consumer.gram.diagonal() / scale.square()).reshape(-1, size).sum(dim=1)
            error = error + (steps * energy).sum()
        return error.log()


def _descend(expected: _Expected, start: Tensor) -> Tensor:
    """The log s with the least expected error of all on the way."""
    best, least = start, float("inf")
    log_scale = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([log_scale], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    with torch.enable_grad():
        for _ in range(STEPS):
            error = expected(log_scale)
            if error.item() < least:
                best, least = log_scale.detach().clone(), error.item()
            (log_scale.grad,) = torch.autograd.grad(error, log_scale)
            optimizer.step()
            schedule.step()
    return best


def _counts(problem: FoldProblem) -> Tensor:
    """How much each sampled input counts, [n], in the dtype of the weights."""
    assert problem.rows is not None
    rows = problem.rows.to(problem.consumers[0].weight.dtype)
    return rows.new_ones(len(rows)) if problem.row_weights is None else problem.row_weights.to(rows)


def joint_error(problem: FoldProblem, scale: Tensor) -> float:
    """``|X W^T - A(X / s) Q(W s)^T|^2 / |X W^T|^2`` over the sampled inputs X; A and Q round inputs and weights.

    Each input counts by its weight.
    """
    assert problem.rows is not None and problem.activations is not None
    error = energy = 0.0
    rows = problem.rows.to(scale.dtype)
    counts = _counts(problem).unsqueeze(1)
    rounded_rows = quantize_tokens(rows / scale, problem.activations)
    for consumer in problem.consumers:
        importance = importance_of(consumer.gram.diagonal() / scale.square()) if problem.searched else None
        rounded = nearest_on_grid(consumer.weight * scale, consumer.spec, importance).dequantize().to(scale.dtype)
        exact = rows @ consumer.weight.t()  # [rows, out]
        error += float(((exact - rounded_rows @ rounded.t()).square() * counts).sum())
        energy += float((exact.square() * counts).sum())
    return error / energy if energy else 0.0


TRANSFORM = Transform(
    name="smoothquant",
    summary="moves outliers of activations into the weights; for quantized activations (arXiv 2211.10438)",
    solve=solve,
    quantizes_inputs=True,
    needs_rows=True,
)
