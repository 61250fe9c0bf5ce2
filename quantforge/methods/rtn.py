"""Round to nearest: every weight takes the closest code of its group's min-max grid. Needs no calibration."""

import torch

from quantforge.errors import NumericsError
from quantforge.methods import Method, Solution, WeightProblem
from quantforge.numerics.grid import choose_codes, minmax_grid
from quantforge.numerics.metrics import all_finite
from quantforge.quantized import QuantizedWeight


def solve(problem: WeightProblem) -> Solution:
    """Raises NumericsError, naming the site, when the weight is not finite."""
    weight, spec = problem.weight.detach(), problem.spec
    if not all_finite(weight):
        bad = int((~torch.isfinite(weight)).sum())
        raise NumericsError(f"{problem.name}: {bad} of {weight.numel()} weights are not finite")
    scale, zero = minmax_grid(weight, spec)
    return Solution(QuantizedWeight(spec, choose_codes(weight, scale, zero, spec), scale, zero))


METHOD = Method(
    name="rtn",
    summary="round to nearest on a min-max grid; no calibration data",
    needs_gram=False,
    solve=solve,
)
