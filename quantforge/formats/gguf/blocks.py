"""Codes and scales as GGUF blocks of 32 weights, and back to nothing: codes never pass through floats.

| block type | bytes | layout (llama.cpp, ggml-common.h) | weight |
|---|---|---|---|
| Q4_0 | 18 | fp16 d, 16 bytes of codes | (q - 8) * d |
| Q4_1 | 20 | fp16 d, fp16 m, 16 bytes of codes | q * d + m |
| Q8_0 | 34 | fp16 d, 32 signed bytes | q * d |

A byte of 4-bit codes holds weight j in its low and weight j + 16 in its high half. A group of several blocks repeats
its scale in each. Arithmetic on these values is exact in float32, so servers get the very weights of the grid.
"""

import torch

from quantforge.formats import as_float16
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec

BLOCK = 32
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def block_type(spec: QuantSpec) -> str | None:
    """The block type that holds a grid of these bits and symmetry; None when there is none."""
    return {(4, True): "Q4_0", (4, False): "Q4_1", (8, True): "Q8_0"}.get((spec.bits, spec.symmetric))


def bits_per_weight(spec: QuantSpec) -> float:
    """Stored bits of a weight of a grid that a block type holds."""
    kind = block_type(spec)
    assert kind is not None
    return 8 * BLOCK_BYTES[kind] / BLOCK


def pack_blocks(weight: QuantizedWeight, name: str) -> torch.Tensor:
    """The blocks of the site `name`, uint8 [out, in / 32 * bytes of a block].

    Raises NumericsError when float16 cannot hold a scale, or with Q4_1 a minimum ``-zero * scale``, exactly.
    """
    kind = block_type(weight.spec)
    assert kind is not None and weight.in_features % BLOCK == 0 and weight.group_index is None
    blocks = weight.codes.reshape(weight.out_features, -1, BLOCK)
    parts = [_per_block(as_float16(weight.scale, name), blocks)]
    if kind == "Q4_1":
        minima = -weight.zero.to(torch.float32) * weight.scale.to(torch.float32)  # exact: 4 bits times at most 11
        parts.append(_per_block(as_float16(minima, f"{name}, minima of its groups"), blocks))
    if kind == "Q8_0":
        parts.append(blocks ^ 0x80)  # code - 128, in two's complement
    else:
        parts.append(blocks[..., : BLOCK // 2] | blocks[..., BLOCK // 2 :] << 4)
    return torch.cat(parts, dim=-1).flatten(1)


def _per_block(values: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """One float16 for each block from one a group, as bytes [out, blocks, 2]."""
    repeated = values.repeat_interleave(blocks.shape[1] // values.shape[1], dim=1)
    return repeated.unsqueeze(-1).contiguous().view(torch.uint8)
