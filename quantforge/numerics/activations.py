"""Activations on a grid of their own, as servers round them while a model runs."""

import torch
from torch import Tensor

from quantforge.spec import ActivationSpec


def quantize_tokens(values: Tensor, spec: ActivationSpec) -> Tensor:
    """Round each token of ``[..., in]`` to its own symmetric grid and back; same dtype, computed in it.

    Equal, bit for bit, to compressed-tensors 0.20.1 with strategy ``token`` and ``dynamic`` on ``[batch, tokens, in]``:
    the scale is ``max |x| / 127.5``, or the dtype's epsilon for a token of zeros; values are clamped to -128 .. 127 and
    rounded half to even. (Given two dims that library takes one scale for all tokens; servers do not, nor is it done
    here.)
    """
    half = 1 << (spec.bits - 1)
    scale = values.abs().amax(dim=-1, keepdim=True) / (half - 0.5)
    scale.masked_fill_(scale == 0, torch.finfo(values.dtype).eps)
    return (values / scale).clamp_(-half, half - 1).round_().mul_(scale)
