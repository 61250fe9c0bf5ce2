"""Coordinate descent over codes: change one code at a time as long as that lowers the proxy loss.

QuantEase, arXiv 2309.01885; the same step is used between updates of the scales in GuidedQuant, arXiv 2505.07004. With
E = W - Q and H the gram, the loss tr(E H E^T) as a function of one weight's code is a parabola around

    q_j + (E H)_j / (H_jj scale)

so the best code, the others being fixed, is that value rounded. Columns are visited one after the other, all rows at a
time. No step raises the loss.
"""

import torch
from torch import Tensor

from quantforge.numerics.grid import offset_bounds
from quantforge.quantized import QuantizedWeight

BLOCK = 64
"""Columns whose part of E H is kept up to date together; the others' is computed when their block is reached."""


def refine_codes(weight: Tensor, start: QuantizedWeight, gram: Tensor, sweeps: int) -> QuantizedWeight:
    """Better codes on the same grid.

    Args:
        weight: W, [out, in], float32 or float64; everything is computed in this dtype.
        start: the codes to begin with; a group of zeros stays zero.
        gram: H, [in, in], symmetric, its diagonal positive.
        sweeps: visits of every column.
    """
    spec = start.spec
    out_features, in_features = weight.shape
    gram = gram.to(weight.dtype)
    slopes = (gram / gram.diagonal().unsqueeze(1)).contiguous()  # row j: H_j / H_jj
    scales = start.scale.to(weight.dtype).t().contiguous()  # [groups, out]
    width = in_features // len(scales)
    lows, highs = offset_bounds(weight, start.zero, spec)
    offsets = start.offsets(weight.dtype).flatten(1).t().contiguous()  # [in, out]
    error = (weight - start.dequantize().to(weight.dtype)).t().contiguous()  # E^T, [in, out]
    for _ in range(sweeps):
        for first in range(0, in_features, BLOCK):
            last = min(first + BLOCK, in_features)
            pull = slopes[first:last] @ error  # [block, out]: (E H)_j / H_jj
            inside = slopes[first:last, first:last].t().contiguous()  # row j: what a change in j does to the block
            for place, column in enumerate(range(first, last)):
                scale, offset = scales[column // width], offsets[column]
                best = pull[place].div(scale).add_(offset).round_()
                torch.clamp(best, lows[column // width], highs[column // width], out=best)
                change = best.sub(offset).mul_(scale)  # of the dequantized weight
                offsets[column] = best
                error[column] -= change
                pull[place + 1 :].addr_(inside[place, place + 1 :], change, alpha=-1)
    codes = offsets.t().reshape(out_features, len(scales), -1) + start.zero.to(weight.dtype).unsqueeze(-1)
    return QuantizedWeight(spec, codes.to(torch.uint8).reshape(out_features, in_features), start.scale, start.zero)
