"""The layout of packed weights on the CPU, which `cpu/panels.c` reads: panels of 16 output rows.

A panel holds, word after word along the inputs, 16 words of 32 bits side by side, one of each row, so that a vector
instruction works on as many rows as it has lanes and reads memory in order:

    weight  int32 [panels, words, 16]   a word: 8 codes of 4 bits, or 4 of 8 bits, of inputs that follow each other
    scales  [panels, groups, 16]        in the dtype that the checkpoint has
    zeros   uint8 [panels, groups, 16]  or none: the middle code

In a word of 4-bit codes, byte j holds input j in its lower and input j + 4 in its upper half, so that
``w & 0x0f0f0f0f`` is inputs 0 to 3 as bytes and ``w >> 4 & 0x0f0f0f0f`` inputs 4 to 7. Rows are padded to whole panels,
inputs to whole words, with code 0; padded rows have scale 0 and are never written.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quantforge.kernels import reference
from quantforge.kernels.planar import group_inputs

ROWS = 16
PLACES = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 1, 2, 3)}
"""Which input of a word each code is, from the lowest bits up."""


def fits(in_features: int, group_size: int, bits: int) -> bool:
    """Whether groups end where words do; one group for whole rows always fits."""
    group = group_inputs(group_size, in_features)
    return bits in PLACES and (group == in_features or group % (32 // bits) == 0)


def pack(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """uint8 codes [out, in], scales and zeros [out, groups] -> weight, scales, zeros of this layout.

    Raises ValueError for a grid that has no place in it (see `fits`), or for codes that are too large.
    """
    out_features, in_features = codes.shape
    if not fits(in_features, group_size, bits):
        raise ValueError(
            f"panels hold 4 or 8 bits and groups of whole words, not {bits} bits in groups of {group_size}"
        )
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"codes reach {int(codes.max())}; {bits} bits end at {(1 << bits) - 1}")
    panels, words = -(-out_features // ROWS), -(-in_features * bits // 32)
    weight = torch.empty(panels, words, ROWS, dtype=torch.int32)
    step = max(1, (1 << 22) // max(1, in_features * ROWS))  # panels at once: bounds the memory of packing
    for first in range(0, panels, step):
        weight[first : first + step] = _words(codes[first * ROWS : (first + step) * ROWS], bits, words)
    return weight, _by_panel(scales, panels), None if zeros is None else _by_panel(zeros, panels)


def _words(codes: Tensor, bits: int, words: int) -> Tensor:
    """int32 [panels, words, 16] of the rows of some panels: bytes first, which are a word in little-endian order."""
    panels = -(-len(codes) // ROWS)
    missing = (0, words * (32 // bits) - codes.shape[1], 0, panels * ROWS - len(codes))
    grouped = functional.pad(codes, missing).view(panels, ROWS, words, 32 // bits)
    if bits == 4:
        grouped = grouped[..., :4] | grouped[..., 4:] << 4
    return grouped.contiguous().view(torch.int32).squeeze(-1).transpose(1, 2)


def _by_panel(values: Tensor, panels: int) -> Tensor:
    """[out, groups] -> [panels, groups, 16]."""
    padded = values.new_zeros(panels * ROWS, values.shape[1])
    padded[: len(values)] = values
    return padded.view(panels, ROWS, -1).transpose(1, 2).contiguous()


def unpack(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    group_size: int,
    out_features: int,
    in_features: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The codes, scales and zeros that were packed, to the last bit; `group_size` is not needed."""
    positions = [PLACES[bits].index(place) for place in range(32 // bits)]
    mask = (1 << bits) - 1
    found = torch.stack([(weight >> (position * bits) & mask).to(torch.uint8) for position in positions], dim=-1)
    codes = found.transpose(1, 2).reshape(len(weight) * ROWS, -1)[:out_features, :in_features]  # [padded out, in]
    zero = None if zeros is None else _by_row(zeros, out_features)
    return codes.contiguous(), _by_row(scales, out_features), zero


def _by_row(values: Tensor, out_features: int) -> Tensor:
    """[panels, groups, 16] -> [out, groups]."""
    return values.transpose(1, 2).reshape(len(values) * ROWS, -1)[:out_features].contiguous()


def dequantize(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    group_size: int,
    out_features: int,
    in_features: int,
) -> Tensor:
    """Float32 [out, in] without a compiled kernel."""
    codes, scale, zero = unpack(
        weight,
        scales,
        zeros,
        bits=bits,
        group_size=group_size,
        out_features=out_features,
        in_features=in_features,
    )
    group = group_inputs(group_size, in_features)
    return reference.dequantize_grouped(codes, scale, zero, bits=bits, group_size=group, dtype=torch.float32)
