"""The best scales for given codes, in closed form.

With the codes fixed, a row's dequantized weights are a linear function of its scales s [groups], and the proxy loss is
a quadratic one: ``(w - C s) H (w - C s)^T``, C [in, groups] holding code - zero of each group in its own column. Its
minimum solves ``(C^T H C) s = C^T H w``, a small system a row. Alternating with updates of the codes this is the LNQ of
GuidedQuant (arXiv 2505.07004).
"""

import torch
from torch import Tensor

from quantforge.numerics.grid import store_signed_scale
from quantforge.numerics.metrics import proxy_loss
from quantforge.quantized import QuantizedWeight

RIDGE = 1e-3
"""Pull towards the present scales, relative to the system's mean diagonal."""

LARGEST_CHANGE = 0.5
"""A scale that would change by more than this share stays as it is."""


def refit_scales(weight: Tensor, start: QuantizedWeight, gram: Tensor) -> QuantizedWeight:
    """The same codes under better scales; rows whose proxy loss would not fall, once scales are rounded, stay.

    Args:
        weight: w, [out, in], float32 or float64; everything is computed in this dtype.
        start: codes and scales to begin with.
        gram: H, [in, in], symmetric.
    """
    spec = start.spec
    groups = start.scale.shape[1]
    gram = gram.to(weight.dtype)
    offsets = start.offsets(weight.dtype)  # [out, groups, group]
    present = start.scale.to(weight.dtype)
    missed = weight - start.dequantize().to(weight.dtype)
    slope = ((missed @ gram).reshape(offsets.shape) * offsets).sum(-1)  # C^T H (w - C s), [out, groups]
    width = offsets.shape[-1]
    system = torch.empty(weight.shape[0], groups, groups, dtype=weight.dtype, device=weight.device)
    for group in range(groups):
        seen = offsets[:, group] @ gram[group * width : (group + 1) * width]  # [out, in]
        system[:, group] = (seen.reshape(offsets.shape) * offsets).sum(-1)
    diagonal = system.diagonal(dim1=1, dim2=2)  # a view
    diagonal += RIDGE * diagonal.mean(dim=1, keepdim=True) + torch.finfo(weight.dtype).tiny
    change = torch.linalg.solve(system, slope.unsqueeze(-1)).squeeze(-1) / present  # relative
    fitted = torch.where(change.abs() <= LARGEST_CHANGE, present * (1 + change), present)
    stored = store_signed_scale(fitted, spec)
    after = QuantizedWeight(spec, start.codes, stored, start.zero)
    better = proxy_loss(weight, after.dequantize(), gram) < proxy_loss(weight, start.dequantize(), gram)
    return QuantizedWeight(spec, start.codes, torch.where(better.unsqueeze(1), stored, start.scale), start.zero)
