"""The layout of INT8 weights for INT8 activations: a row of bytes for each out feature, as tensor cores read them.

Inputs are padded to a multiple of 128 and out features to a multiple of 64 with zeros::

    weight[n] = k=0  k=1  k=2  ...  k=in-1  0  ...  0          int8, code - 128
    scales[n]                                                  one for each out feature, floating
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantforge.kernels.planar import COLUMNS

BLOCK = 128
"""Inputs of one step of the kernel."""

MOST_INPUTS = 1 << 17
"""So many products of -128 and -128 just fill an int32."""


def padded_inputs(in_features: int) -> int:
    """Inputs after padding."""
    return -(-in_features // BLOCK) * BLOCK


def fits(in_features: int) -> bool:
    """Whether an int32 holds the sum of any products of so many inputs."""
    return padded_inputs(in_features) < MOST_INPUTS


def pack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out a symmetric 8-bit matrix.

    Args:
        codes: uint8 [out, in] whose zero is 128.
        scales: [out, 1], floating; kept in its dtype.

    Returns:
        int8 [padded out, padded in] and scales [padded out], on the device of `codes`.

    Raises:
        ValueError: another dtype or shape, or more inputs than an int32 can sum.
    """
    out_features, in_features = codes.shape
    if codes.dtype != torch.uint8 or tuple(scales.shape) != (out_features, 1):
        raise ValueError(f"{codes.dtype} {tuple(codes.shape)} with scales {tuple(scales.shape)}; uint8, a scale a row")
    if not fits(in_features):
        raise ValueError(f"{in_features} inputs: products of 8-bit integers fill an int32 from {MOST_INPUTS} on")
    added = -out_features % COLUMNS
    signed = (codes ^ 128).view(torch.int8)  # code - 128
    weight = pad(signed, (0, padded_inputs(in_features) - in_features, 0, added)).contiguous()
    return weight, pad(scales[:, 0], (0, added)).contiguous()


def unpack(weight: Tensor, scales: Tensor, *, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    """The codes and scales that `pack` was given, exactly."""
    codes = weight[:out_features, :in_features].contiguous().view(torch.uint8) ^ 128
    return codes, scales[:out_features, None].contiguous()
