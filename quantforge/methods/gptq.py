"""GPTQ: round one input column after the other, each time correcting for the errors already made.

Papers: GPTQ, arXiv 2210.17323; OBQ, arXiv 2208.11580. Minimizes tr((W-Q) H (W-Q)^T) greedily, H the damped gram.
GPTQ spreads the error of a rounded column over the columns still to come with rows of U, the upper Cholesky factor of
H^-1. Here the same corrections are pulled instead of pushed, as in LDLQ (QuIP, arXiv 2307.13304, which proves the two
equal): with H = R R^T, R = U^-1 upper triangular, column j is rounded at

    w_j + sum_{k<j} (w_k - q_k) R[k,j] / R[j,j]

so one Cholesky factorization suffices and H is never inverted. The codes are then refined by coordinate descent
(`numerics.descent`). Letters: W `weight`, Q the dequantized codes, H `gram`,
R / diag(R) `feedback`, W - Q `error`. Inside the solver matrices are transposed, [in, out], so a column is contiguous.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantforge.errors import CalibrationError, NumericsError
from quantforge.methods import Method, Option, OptionValue, Solution, WeightProblem
from quantforge.numerics.descent import refine_codes
from quantforge.numerics.grid import nearest_on_grid, offset_bounds, searched_grid
from quantforge.numerics.metrics import all_finite
from quantforge.numerics.refit import refit_scales
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec

FIRST_DAMPING = 1e-6  # tried after a damping of 0 failed
COMPARED_ROWS = 512  # rows compared with round-to-nearest at a time


@dataclass(frozen=True, eq=False)
class Factor:
    """What a damped gram says about corrections.

    Attributes:
        feedback: [in, in], strictly upper triangular; entry [k, j] is how much of column k's error column j takes on.
            None when no damping made the gram positive definite.
        pivots: [in], the squared diagonal of R; None with `feedback`.
        damping: relative damping, the one that worked or the last one tried.
        damping_steps: times it was raised.
    """

    feedback: Tensor | None
    pivots: Tensor | None
    damping: float
    damping_steps: int


@dataclass(frozen=True, eq=False)
class Order:
    """The order in which columns are visited, and the factor in that order.

    Attributes:
        gram: [in, in], in the original order, dead inputs cut off from the others.
        columns: int64 [in], the column visited first, second, ...
        dead: bool [in], in the original order, inputs that were never active.
    """

    gram: Tensor
    columns: Tensor
    factor: Factor
    dead: Tensor

    @property
    def dead_inputs(self) -> int:
        return int(self.dead.sum())

    def damped(self) -> Tensor:
        """The gram that was factorized, [in, in], in the original order."""
        gram = self.gram.clone()
        gram.diagonal().add_(self.factor.damping * gram.diagonal().mean())
        return gram

    def importance(self) -> Tensor:
        """What a squared rounding error of each column costs, [in], in the original order.

        With R R^T the damped gram, ``tr(E H E^T)`` is the sum over columns of ``R[j,j]^2`` times the squared error made
        in rounding column j: what of an input is not explained by those visited after it, whose columns make up for the
        rest. A dead input is worth the damping alone.
        """
        assert self.factor.pivots is not None
        importance = torch.empty_like(self.factor.pivots)
        importance[self.columns] = self.factor.pivots
        importance = importance.masked_fill(self.dead, 0)
        mean = importance.sum() / max(1, len(importance) - self.dead_inputs)
        return torch.where(self.dead, self.factor.damping * mean, importance)


def solve(problem: WeightProblem) -> Solution:
    """Choose a grid for the original weight and round on it; a row on which round-to-nearest is better keeps that.

    When no damping up to 1 makes the gram positive definite all rows are rounded to nearest and `fallback` says so.

    Raises:
        NumericsError: the weight or the gram is not finite.
        CalibrationError: the gram is missing or has the wrong shape.
    """
    weight, gram = _checked(problem)
    spec = problem.spec
    nearest = nearest_on_grid(weight, spec)
    scale, zero = nearest.scale, nearest.zero
    order = visiting_order(gram.to(weight.dtype), problem.options)
    factor = order.factor
    if factor.feedback is None:
        diagonal = gram.diagonal()
        reason = (
            f"gptq: the gram of {problem.tokens} tokens is not positive definite even at damping {factor.damping:g} "
            f"(diagonal {float(diagonal.min()):.3g} to {float(diagonal.max()):.3g}); rounded to nearest"
        )
        return Solution(nearest, None, factor.damping_steps, order.dead_inputs, reason)
    if problem.options["grid"] != "minmax":
        importance = order.importance()
        if problem.options["grid"] == "mse":
            importance = torch.ones_like(importance)
        scale, zero = searched_grid(weight, spec, importance)
    block_size = int(problem.options["block_size"])
    codes = round_columns(weight, factor.feedback, order.columns, scale, zero, spec, block_size)
    solved = QuantizedWeight(spec, codes, scale, zero)
    sweeps, refits = int(problem.options["sweeps"]), int(problem.options["refits"])
    if sweeps or refits:
        damped = order.damped()
        solved = refine_codes(weight, solved, damped, sweeps)
        for _ in range(refits):
            solved = refine_codes(weight, refit_scales(weight, solved, damped), damped, 1)
    worse = _rows_worse(weight, solved, nearest, gram).unsqueeze(1)
    kept = QuantizedWeight(
        spec,
        torch.where(worse, nearest.codes, solved.codes),
        torch.where(worse, nearest.scale, solved.scale),
        torch.where(worse, nearest.zero, solved.zero),
    )
    return Solution(kept, factor.damping, factor.damping_steps, order.dead_inputs)


def visiting_order(gram: Tensor, options: Mapping[str, OptionValue]) -> Order:
    """In which order to visit the columns, and what the gram says about corrections in that order.

    Inputs that were never active (zero on the diagonal of the gram) are cut off from all others: their weights are
    rounded to nearest and correct nothing. With `act_order` columns are visited by descending diagonal but keep
    the scale and zero of their group in the original order.

    Args:
        gram: [in, in], finite, symmetric.
        options: all options of the method.
    """
    diagonal = gram.diagonal()
    dead = diagonal == 0
    dead_inputs = int(dead.sum())
    if dead_inputs:
        mean = float(diagonal.sum()) / max(1, len(diagonal) - dead_inputs)
        gram = gram.masked_fill(dead | dead.unsqueeze(1), 0)
        gram.diagonal().masked_fill_(dead, mean or 1.0)
    columns, visited = torch.arange(len(diagonal), device=gram.device), gram
    if options["act_order"]:
        columns = diagonal.argsort(descending=True, stable=True)
        visited = gram.index_select(0, columns).index_select(1, columns)
    return Order(gram, columns, factorize(visited, float(options["damping"])), dead)


def factorize(gram: Tensor, damping: float) -> Factor:
    """The feedback of ``gram + d * mean(diagonal) * I``, columns in visiting order, for the first d that works.

    d starts at `damping` and grows tenfold up to 1; from 0 the next is FIRST_DAMPING.
    """
    ladder = [damping]
    while ladder[-1] < 1:
        ladder.append(min(1.0, float(f"{ladder[-1] * 10 or FIRST_DAMPING:.6g}")))
    reversed_gram = gram.flip(0, 1)  # a copy; its factor L L^T, flipped back, is R R^T
    diagonal = gram.diagonal().flip(0)
    for step, level in enumerate(ladder):
        reversed_gram.diagonal().copy_(diagonal + level * diagonal.mean())
        lower, info = torch.linalg.cholesky_ex(reversed_gram)
        if int(info) == 0:
            feedback = (lower / lower.diagonal()).flip(0, 1)
            if all_finite(feedback):
                feedback.diagonal().zero_()
                return Factor(feedback, lower.diagonal().square().flip(0), level, step)
    return Factor(None, None, ladder[-1], len(ladder) - 1)


def round_columns(
    weight: Tensor, feedback: Tensor, order: Tensor, scale: Tensor, zero: Tensor, spec: QuantSpec, block_size: int
) -> Tensor:
    """Codes uint8 [out, in], columns visited in `order`; `feedback` [in, in] is in that order, see `Factor`.

    A block starts with one matrix product that brings in the errors of all blocks before it. Inside a block every
    column reads the whole block: rows of `error` not reached yet hold finite weights and meet a feedback of zero.
    """
    out_features, in_features = weight.shape
    error = weight.t().index_select(0, order)  # [in, out]; row j turns from w_j into w_j - q_j
    target = error.clone()  # [in, out]; row j turns from w_j into the value to round, then into code - zero
    scales = scale.to(weight.dtype).t().contiguous().unbind(0)  # groups x [out]
    lows, highs = (bound.unbind(0) for bound in offset_bounds(weight, zero, spec))
    groups = (order // (in_features // len(scales))).tolist()
    for start in range(0, in_features, block_size):
        stop = min(start + block_size, in_features)
        if start:
            target[start:stop].addmm_(feedback[:start, start:stop].t(), error[:start])
        block_errors = error[start:stop].t()  # [out, block]
        inside = feedback[start:stop, start:stop].t().contiguous()  # [column, earlier column]
        columns = zip(target[start:stop], error[start:stop], inside, groups[start:stop], strict=True)
        for value, residual, row, group in columns:
            value.addmv_(block_errors, row)
            torch.div(value, scales[group], out=value)
            value.round_()
            torch.clamp(value, lows[group], highs[group], out=value)
            torch.addcmul(residual, value, scales[group], value=-1, out=residual)
    offsets = target.index_select(0, order.argsort()).t().reshape(out_features, len(scales), -1)  # [out, groups, group]
    return (offsets + zero.unsqueeze(-1)).to(torch.uint8).reshape(out_features, in_features)


def _checked(problem: WeightProblem) -> tuple[Tensor, Tensor]:
    """Weight and gram without autograd history, finite and of matching shapes."""
    in_features = problem.weight.shape[1]
    if problem.gram is None or tuple(problem.gram.shape) != (in_features, in_features):
        got = None if problem.gram is None else tuple(problem.gram.shape)
        raise CalibrationError(f"{problem.name}: gptq needs a gram of shape {(in_features, in_features)}; got {got}")
    weight, gram = problem.weight.detach(), problem.gram.detach()
    for what, tensor in (("weights", weight), ("gram entries", gram)):
        if not all_finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise NumericsError(f"{problem.name}: {bad} of {tensor.numel()} {what} are not finite")
    return weight, gram


def _rows_worse(weight: Tensor, solved: QuantizedWeight, nearest: QuantizedWeight, gram: Tensor) -> Tensor:
    """Rows [out] on which `solved` has a strictly larger proxy loss than `nearest`.

    The difference of the two losses, a H a^T - b H b^T = (a - b) H (a + b)^T, takes one product and no cancellation.
    Rows go in batches that stay in cache.
    """
    gram = gram.to(weight.dtype)
    worse = []
    for start in range(0, weight.shape[0], COMPARED_ROWS):
        stop = start + COMPARED_ROWS
        first, second = (grid.rows(start, stop).dequantize().to(weight.dtype) for grid in (solved, nearest))
        apart = second - first  # a - b
        both = first.add_(second).sub_(weight[start:stop], alpha=2)  # -(a + b)
        worse.append((apart @ gram).mul_(both).sum(dim=1) < 0)
    return torch.cat(worse)


METHOD = Method(
    name="gptq",
    summary="rounds column by column, correcting for the errors already made (arXiv 2210.17323)",
    needs_gram=True,
    solve=solve,
    options={
        "act_order": Option(True, "visit the inputs with the largest mean square first"),
        "grid": Option(
            "search",
            "minmax: each group's full range; mse: the range with the least squared error; search: with the least "
            "output error",
            choices=("minmax", "mse", "search"),
        ),
        "sweeps": Option(2, "later visits of every column, to change single codes where that helps", minimum=0.0),
        "refits": Option(0, "times the scales are then fitted to the codes, and the codes refined again", minimum=0.0),
        "damping": Option(0.01, "added to the gram's diagonal, relative to its mean", minimum=0.0, maximum=1.0),
        "block_size": Option(32, "columns between two matrix products; changes speed only", minimum=1),
    },
)
