"""Activations on a grid of their own, as servers round them while a model runs."""

import torch
from torch import Tensor

LOWEST, HIGHEST = -128, 127


def quantize_rows(x: Tensor) -> Tensor:
    """Activations as 8-bit integers with a symmetric scale for each token, dequantized.

    The scale is ``max|x| / 127.5`` (the smallest step of the dtype when a row is zero) and codes are
    ``round(clamp(x / scale, -128, 127))``: compressed-tensors' dynamic per-token quantization, to the bit.

    Args:
        x: [..., in], floating point; every leading index is a token.
    """
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = largest / ((HIGHEST - LOWEST) / 2)
    scale = scale.masked_fill(scale == 0, torch.finfo(x.dtype).eps)
    return (x / scale).clamp_(LOWEST, HIGHEST).round_().mul_(scale)
