"""AWQ: columns that meet large inputs are scaled up, so that they are rounded more finely (arXiv 2306.00978).

The scale is ``a^alpha`` with a the mean magnitude of each input (section 3.2 of the paper), or the variant of the
authors' code that also divides by the weights' own magnitude, ``a^alpha / w^(1 - alpha)``. Of both and 20 exponents
the one with the least output error is taken. The error is computed from the gram and not by running the layer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quantforge.transforms import (
    FoldProblem,
    FoldSolution,
    Transform,
    rounding_error,
    tidy_scale,
    tied_mean,
)

ALPHAS = tuple(step / 20 for step in range(1, 21))
RANKED_ROWS = 512
"""Candidates are compared on so many rows of each consumer; rows are rounded independently, so a sample ranks well."""

FINALISTS = 3
"""So many candidates, best on min-max grids, are tried on searched grids, which take 30 times as long."""


def solve(problem: FoldProblem) -> FoldSolution:
    """The best scale; `before` and `after` are exact over all rows."""
    ones = torch.ones_like(problem.mean_abs)
    candidates = list(_candidates(problem))
    ranking = sorted(
        (rounding_error(problem, scale, searched=False, max_rows=RANKED_ROWS), place)
        for place, (_, _, scale) in enumerate(candidates)
    )
    places = [place for _, place in ranking[: FINALISTS if problem.searched else 1]]
    if problem.searched:
        _, best = min(
            (rounding_error(problem, candidates[place][2], searched=True, max_rows=RANKED_ROWS), place)
            for place in places
        )
    else:
        best = places[0]
    alpha, rule, scale = candidates[best]
    before = rounding_error(problem, ones, searched=problem.searched)
    after = rounding_error(problem, scale, searched=problem.searched)
    if after < before:
        return FoldSolution(scale, alpha, rule, before, after)
    return FoldSolution(ones, 0.0, "none", before, before)


def _candidates(problem: FoldProblem) -> Iterator[tuple[float, str, Tensor]]:
    """(alpha, rule, scale)."""
    inputs = tied_mean(problem.mean_abs, problem.channels)
    weights = tied_mean(_relative_magnitude(problem), problem.channels)
    for alpha in ALPHAS:
        yield alpha, "inputs", tidy_scale(inputs**alpha, problem.powers_of_two)
        scale = torch.where(inputs > 0, inputs**alpha / (weights ** (1 - alpha) + 1e-4), 0.0)
        yield alpha, "inputs and weights", tidy_scale(scale, problem.powers_of_two)


def _relative_magnitude(problem: FoldProblem) -> Tensor:
    """Mean over rows of each column's magnitude, relative to the largest of its group; [in]."""
    total = torch.zeros_like(problem.mean_abs)
    for consumer in problem.consumers:
        out_features, in_features = consumer.weight.shape
        grouped = consumer.weight.abs().reshape(out_features, consumer.spec.groups(in_features), -1)
        relative = grouped / (grouped.amax(dim=-1, keepdim=True) + 1e-6)  # [out, groups, group]
        total += relative.reshape(out_features, in_features).sum(dim=0)
    return total / sum(consumer.weight.shape[0] for consumer in problem.consumers)


TRANSFORM = Transform(
    name="awq",
    summary="scales up the columns that meet large inputs (arXiv 2306.00978)",
    solve=solve,
    solver_options={"grid": "search"},
)
