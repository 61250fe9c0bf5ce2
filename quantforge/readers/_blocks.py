"""GGUF blocks of 32 weights as codes, scales and zeros (llama.cpp, ggml-common.h: block_q4_0, block_q4_1, block_q8_0).

Of the file only; which rows go where is the architecture's business.
"""

import torch

from quantforge.errors import SourceError
from quantforge.readers import DecodedWeight, Scheme

BLOCK = 32
SCHEMES = {"Q4_0": (4, True), "Q4_1": (4, False), "Q8_0": (8, True)}
"""Bits and symmetry of the block types that hold an integer grid."""

_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def boundaries(blocks: torch.Tensor, kind: str) -> list[int]:
    """Which blocks of a row have another scale (or minimum) than the one before, in any row; their places in a row.

    `blocks` is uint8 [out, bytes of a row].
    """
    grouped = blocks.reshape(len(blocks), -1, _BYTES[kind])  # [out, blocks, bytes]
    heads = grouped[..., : _BYTES[kind] - (BLOCK if kind == "Q8_0" else BLOCK // 2)]
    differs = (heads[:, 1:] != heads[:, :-1]).any(dim=-1).any(dim=0)  # [blocks - 1]
    return [place + 1 for place in differs.nonzero().flatten().tolist()]


def decode_blocks(blocks: torch.Tensor, scheme: Scheme, site: str) -> DecodedWeight:
    """The grid of a matrix, uint8 [out, bytes of a row], of the type that `scheme.checkpoint_format` names.

    A group is as many blocks as the scheme says, whose scales must be equal. Raises SourceError for a Q4_1 block whose
    minimum is not ``-zero * scale`` with a zero of 0 to 15, or a scale that is not finite.
    """
    kind = scheme.checkpoint_format
    grouped = blocks.reshape(len(blocks), -1, _BYTES[kind])  # [out, blocks, bytes]
    scale = _float16(grouped[..., :2])  # [out, blocks]
    if not bool(torch.isfinite(scale).all()):
        raise SourceError(f"{site}: {int((~torch.isfinite(scale)).sum())} of {scale.numel()} scales are not finite")
    if kind == "Q8_0":
        codes, zero = grouped[..., 2:] ^ 0x80, torch.full(scale.shape, 128, dtype=torch.uint8)
    else:
        halves = grouped[..., -BLOCK // 2 :]
        codes = torch.cat([halves & 15, halves >> 4], dim=-1)
        zero = torch.full(scale.shape, 8, dtype=torch.uint8)
        if kind == "Q4_1":
            zero = _zeros(scale, _float16(grouped[..., 2:4]), site)
    every = scale.shape[1] if scheme.group_size is None else scheme.group_size // BLOCK
    codes = codes.flatten(1)
    return DecodedWeight(
        codes=codes.contiguous(),
        scale=scale[:, ::every].contiguous(),
        zero=zero[:, ::every].contiguous(),
        group_index=torch.arange(codes.shape[1]) // (every * BLOCK),
        bits=scheme.bits,
    )


def _float16(raw: torch.Tensor) -> torch.Tensor:
    """float16 [out, blocks] from bytes [out, blocks, 2]."""
    return raw.contiguous().view(torch.float16).squeeze(-1)


def _zeros(scale: torch.Tensor, minimum: torch.Tensor, site: str) -> torch.Tensor:
    """uint8 [out, blocks], so that ``-zero * scale`` is the minimum to the last bit; of a block of zeros it is 8."""
    step, low = scale.to(torch.float32), minimum.to(torch.float32)
    zero = torch.where((step == 0) & (low == 0), 8.0, (-low / step).round())
    exact = (zero >= 0) & (zero <= 15) & (-zero * step == low)  # NaN and infinity are neither
    if not bool(exact.all()):
        row, block = (~exact).nonzero()[0].tolist()
        raise SourceError(
            f"{site}: {int((~exact).sum())} of {exact.numel()} Q4_1 blocks have a minimum that is no whole multiple of "
            f"their scale, such as {float(low[row, block]):.6g} for {float(step[row, block]):.6g}, so their zero is no "
            "integer"
        )
    return zero.to(torch.uint8)
