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

Candidate = tuple[float, str, Tensor]
"""Alpha, rule and scale."""

ALPHAS = tuple(step / 20 for step in range(1, 21))
RANKED_ROWS = 128
"""All candidates are compared on so many rows of each consumer; rows are rounded independently, a sample ranks well."""

FINALISTS = 4
FINAL_ROWS = 512


def solve(problem: FoldProblem) -> FoldSolution:
    """The best scale; `before` and `after` are exact over all rows."""
    candidates = list(_candidates(problem))
    finalists = _best(problem, candidates, RANKED_ROWS)[:FINALISTS]
    alpha, rule, scale = _best(problem, finalists, FINAL_ROWS)[0]
    ones = torch.ones_like(problem.mean_abs)
    before, after = rounding_error(problem, ones), rounding_error(problem, scale)
    if after < before:
        return FoldSolution(scale, alpha, rule, before, after)
    return FoldSolution(ones, 0.0, "none", before, before)


def _best(problem: FoldProblem, candidates: list[Candidate], max_rows: int) -> list[Candidate]:
    """Candidates by their error, the least first."""
    return sorted(candidates, key=lambda candidate: rounding_error(problem, candidate[2], max_rows))


def _candidates(problem: FoldProblem) -> Iterator[Candidate]:
    """All scales that are tried."""
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
