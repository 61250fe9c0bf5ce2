"""How far a quantized matrix is from the original, as its inputs see it; and whether numbers are numbers."""

import math

import torch
from torch import Tensor

from quantforge.errors import NumericsError


def all_finite(values: Tensor) -> bool:
    """True when no value is NaN or infinite; one pass, no temporaries (the extremes of a NaN are NaN)."""
    return values.numel() == 0 or all(math.isfinite(float(extreme)) for extreme in values.aminmax())


def require_finite(values: Tensor, what: str) -> None:
    """Raises NumericsError when `values` [samples, length, features] are not finite; `what` they are begins it."""
    if not all_finite(values):
        bad = int((~torch.isfinite(values)).any(-1).sum())
        raise NumericsError(f"{what} is not finite for {bad} of {values[..., 0].numel()} tokens")


def proxy_loss(weight: Tensor, dequantized: Tensor, gram: Tensor) -> Tensor:
    """Mean squared error of each output over the calibration inputs: the diagonal of (W-Q) H (W-Q)^T.

    Args:
        weight: [out, in]; the result has its dtype.
        dequantized: [out, in], any floating dtype.
        gram: H, mean outer product of the inputs, [in, in].
    Returns:
        [out]; its sum is the usual trace.
    """
    residual = weight - dequantized.to(weight.dtype)
    return ((residual @ gram.to(weight.dtype)) * residual).sum(dim=1)


def relative_proxy_loss(weight: Tensor, dequantized: Tensor, gram: Tensor) -> float:
    """``tr((W-Q) H (W-Q)^T) / tr(W H W^T)``: error energy over output energy; 0 when the outputs are all zero."""
    gram = gram.to(weight.dtype)
    energy = float(((weight @ gram) * weight).sum())
    return float(proxy_loss(weight, dequantized, gram).sum()) / energy if energy else 0.0
