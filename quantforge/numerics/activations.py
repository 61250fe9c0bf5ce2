"""Activations on a grid of their own, as servers round them while a model runs: inputs of sites, keys and values."""

import torch
from torch import Tensor

from quantforge.spec import ActivationSpec, KvCacheSpec


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


def cache_scale(largest: Tensor, spec: KvCacheSpec) -> Tensor:
    """Scales for keys or values whose largest magnitudes are `largest`, float32 [heads]: bfloat16 [heads] or [1].

    bfloat16 has the range of float32, and a server that computes in any 16-bit dtype or float32 reads the same number.
    Its rounding moves the largest magnitude by less than half a step of the grid. Where all was zero the scale is 1.
    """
    own = largest if spec.per_head else largest.amax().reshape(1)
    return torch.where(own > 0, own / spec.top, 1.0).to(torch.bfloat16)


def round_cached(values: Tensor, scale: Tensor, spec: KvCacheSpec) -> Tensor:
    """Keys or values [batch, heads, tokens, dim] as they come back from a cache; same dtype, rounded in float32.

    Half to even, and what lies beyond the grid becomes its end, as in the kernels that fill a cache of servers
    (vLLM 0.32.0, ``reshape_and_cache``: saturating conversion of ``x / scale``).
    """
    scale = scale.to(values.device, torch.float32).reshape(-1, 1, 1)  # [heads or 1, 1, 1]
    scaled = values.to(torch.float32) / scale
    if spec.kind == "fp8":
        codes = scaled.clamp(-spec.top, spec.top).to(torch.float8_e4m3fn).to(torch.float32)
    else:
        codes = scaled.clamp_(-128, 127).round_()
    return (codes * scale).to(values.dtype)
