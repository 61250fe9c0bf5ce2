"""Round to nearest: every weight takes the closest code of its group's grid. Needs no calibration unless it searches.

With ``grid=search`` the range of each group is the one with the least error, inputs weighted by their mean square: the
clipping search of AWQ (arXiv 2306.00978).
"""

import torch

from quantforge.errors import CalibrationError, NumericsError
from quantforge.methods import Method, Option, Solution, WeightProblem
from quantforge.numerics.grid import importance_of, nearest_on_grid
from quantforge.numerics.metrics import all_finite


def solve(problem: WeightProblem) -> Solution:
    """Raises NumericsError, naming the site, when the weight is not finite; CalibrationError without a needed gram."""
    weight, spec = problem.weight.detach(), problem.spec
    if not all_finite(weight):
        bad = int((~torch.isfinite(weight)).sum())
        raise NumericsError(f"{problem.name}: {bad} of {weight.numel()} weights are not finite")
    if problem.options.get("grid") != "search":
        return Solution(nearest_on_grid(weight, spec))
    if problem.gram is None:
        raise CalibrationError(f"{problem.name}: rtn with grid=search needs a gram; got None")
    return Solution(nearest_on_grid(weight, spec, importance_of(problem.gram.diagonal())))


METHOD = Method(
    name="rtn",
    summary="round to nearest; on a min-max grid, without calibration data",
    needs_gram=False,
    needs_gram_with={"grid": "search"},
    solve=solve,
    options={
        "grid": Option(
            "minmax",
            "minmax: each group's full range; search: the range with the least error, inputs weighted by mean square",
            choices=("minmax", "search"),
        ),
    },
)
