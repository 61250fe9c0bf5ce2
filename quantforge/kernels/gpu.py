"""The operators on a GPU: by the Triton kernels where these can, else dequantized at every call, which is said once.

Which it is depends on the GPU, on the dtypes of x and scales, and on Triton being there; the layout is the same, so
that nothing need be packed anew, and codes stay packed either way. Importing this asks no device and loads no kernel.
"""

import importlib.util
import warnings
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from quantforge.kernels import launch, planar, reference, rows


def planar_linear(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    *, bits: int, group_size: int, out_features: int,
) -> Tensor:  # fmt: skip
    """``x @ w.T + bias`` for w in the planar layout, in the dtype of x; see `launch.planar_linear` for errors."""
    reason = _not_16_bits(x, scales) or no_kernel(x.device)
    if reason is None:
        return launch.planar_linear(
            x, weight, scales, zeros, bias, bits=bits, group_size=group_size, out_features=out_features
        )
    _say(reason)
    plain = dequantize(
        weight, scales, zeros, bits=bits, group_size=group_size, out_features=out_features, in_features=x.shape[-1]
    )
    return functional.linear(x, plain.to(x.dtype), None if bias is None else bias.to(x.dtype))


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """The same for `rows`, x rounded to INT8 per token. Without a kernel products are summed in float32."""
    if (reason := no_kernel(x.device)) is None:
        return launch.int8_linear(x, weight, scales, bias, out_features=out_features)
    _say(reason)
    codes, scale = rows.unpack(weight, scales, out_features=out_features, in_features=x.shape[-1])
    rounded, step = reference.round_tokens(x)
    y = functional.linear(rounded.to(torch.float32), codes.to(torch.float32) - 128) * step * scale.t()
    return (y if bias is None else y + bias).to(x.dtype)


def dequantize(
    weight: Tensor, scales: Tensor, zeros: Tensor | None,
    *, bits: int, group_size: int, out_features: int, in_features: int,
) -> Tensor:  # fmt: skip
    """Float32 [out, in] from the planar layout, on its device."""
    sizes = {"bits": bits, "group_size": group_size, "out_features": out_features, "in_features": in_features}
    codes, scale, zero = planar.unpack(weight, scales, zeros, **sizes)
    group = planar.group_inputs(group_size, in_features)
    return reference.dequantize_grouped(codes, scale, zero, bits=bits, group_size=group, dtype=torch.float32)


@cache
def no_kernel(device: torch.device) -> str | None:
    """Why none of the kernels runs on a device; None where they do."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    try:
        launch.target_of(device)
    except ValueError as error:
        return str(error)
    return None


def _not_16_bits(x: Tensor, scales: Tensor) -> str | None:
    wrong = [f"{name} {t.dtype}" for name, t in (("x is", x), ("scales are", scales)) if t.dtype not in launch.FLOATS]
    return f"{', '.join(wrong)}; the kernels take float16 and bfloat16" if wrong else None


@cache
def _say(reason: str) -> None:
    warnings.warn(
        f"quantforge: packed layers are dequantized at every call, which is slow: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
