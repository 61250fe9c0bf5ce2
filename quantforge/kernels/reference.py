"""What the operators compute, in plain torch and float64: the yardstick of every kernel, for any bits and groups."""

import torch
from torch import Tensor

PIECE = 256
"""Inputs that share a step of rounded activations, at most, beside 4-bit codes."""


def dequantize(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group_index: Tensor, *, bits: int, dtype: torch.dtype
) -> Tensor:
    """``(codes[o, i] - zeros[o, g]) * scales[o, g]`` with ``g = group_index[i]``, computed in `dtype`, [out, in].

    Args:
        codes: uint8 [out, in].
        scales: floats [out, groups].
        zeros: uint8 [out, groups]; None: the middle code, ``2 ** (bits - 1)``.
        group_index: int64 [in].
    """
    middle = torch.tensor(1 << (bits - 1), dtype=dtype, device=codes.device)
    zero = middle if zeros is None else zeros.to(dtype)[:, group_index]
    return (codes.to(dtype) - zero) * scales.to(dtype)[:, group_index]


def contiguous_groups(in_features: int, group_size: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [in]: the group of each input where groups follow each other; the last may be short."""
    return torch.arange(in_features, device=device) // group_size


def dequantize_grouped(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    """`dequantize` for groups that follow each other, `group_size` inputs each."""
    index = contiguous_groups(codes.shape[1], group_size, codes.device)
    return dequantize(codes, scales, zeros, index, bits=bits, dtype=dtype)


def linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, *, bits: int, group_size: int
) -> Tensor:
    """``x @ w.T + bias`` in float64, [..., out], for x [..., in]; the other arguments as `dequantize` takes them."""
    weight = dequantize_grouped(codes, scales, zeros, bits=bits, group_size=group_size, dtype=torch.float64)
    result = x.to(torch.float64) @ weight.t()
    return result if bias is None else result + bias.to(torch.float64)


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [..., in] and its steps, float32 [..., 1]: each token on its own symmetric grid, computed in float32.

    The step is ``max |x| / 127.5``, or float32's epsilon for a token of zeros; half to even, clamped to -128 .. 127:
    the grid of `quantforge.numerics.activations.quantize_tokens`.
    """
    values = x.to(torch.float32)
    step = values.abs().amax(dim=-1, keepdim=True) / 127.5
    step = torch.where(step == 0, torch.finfo(torch.float32).eps, step)
    return (values / step).round_().clamp_(-128, 127).to(torch.int8), step


def w8a8_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """As `linear`, in float64, for x rounded per token and symmetric codes of 8 bits with a scale a row, [out, 1]."""
    rounded, step = round_tokens(x)
    products = rounded.to(torch.float64) @ (codes.to(torch.float64) - 128).t()  # whole numbers, exact below 2^53
    result = products * step.to(torch.float64) * scales.to(torch.float64).reshape(-1)
    return result if bias is None else result + bias.to(torch.float64)


def round_pieces(x: Tensor, group_size: int) -> Tensor:
    """Float32 [tokens, in] rounded to 8 bits and back, as `w4a8_linear` does it.

    A step, ``max |x| / 127``, for each group of inputs, or for each `PIECE` inputs of a longer group; half to even.
    """
    pieces = []
    for group in torch.split(x.to(torch.float32), group_size, dim=1):
        for piece in torch.split(group, PIECE, dim=1):
            step = piece.abs().amax(dim=-1, keepdim=True) / 127
            step = torch.where(step == 0, torch.finfo(torch.float32).eps, step)
            pieces.append((piece / step).round_().mul_(step))
    return torch.cat(pieces, dim=1)
