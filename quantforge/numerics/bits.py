"""Codes of 2, 3, 4 or 8 bits as a dense little-endian stream in 32-bit words.

Value k occupies bits ``k * bits`` to ``k * bits + bits - 1`` of the stream; bit i of the stream is bit ``i % 32`` of
word ``i // 32``. A value may straddle two words: at 3 bits this is the layout of the GPTQ reference code, 32 values in
3 words. Both functions work on slices, so they need little memory beyond their result.
"""

import math
from typing import get_args

import torch

from quantforge.spec import Bits

WORD_BITS = 32


def pack_codes(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack uint8 `codes` along `dim`.

    Returns contiguous int32 of the same shape, but ``ceil(count * bits / 32)`` along `dim`; unused high bits of the
    last word are zero. Raises ValueError for another dtype, another width, or a code that does not fit in `bits` bits.
    """
    _check_bits(bits)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, not {codes.dtype}")
    if codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"code {int(codes.max())} does not fit in {bits} bits")
    dim %= codes.ndim
    count = codes.shape[dim]
    values, words = period(bits)
    blocks = -(-count // values)
    before, after = math.prod(codes.shape[:dim]), math.prod(codes.shape[dim + 1 :])
    flat = _padded(codes.reshape(before, count, after), blocks * values)
    flat = flat.reshape(before, blocks, values, after)
    packed = torch.zeros(before, blocks, words, after, dtype=torch.int32, device=codes.device)
    for k in range(values):
        word, shift = divmod(k * bits, WORD_BITS)
        value = flat[:, :, k].to(torch.int32)
        packed[:, :, word] |= value << shift
        if shift + bits > WORD_BITS:
            packed[:, :, word + 1] |= value >> (WORD_BITS - shift)
    rows = _words_for(count, bits)
    packed = packed.reshape(before, blocks * words, after)[:, :rows]
    return packed.reshape(*codes.shape[:dim], rows, *codes.shape[dim + 1 :]).contiguous()


def unpack_codes(words: torch.Tensor, bits: int, dim: int, count: int) -> torch.Tensor:
    """The `count` codes that `pack_codes` put into int32 `words` along `dim`: contiguous uint8 of length `count` there.

    Raises ValueError for another dtype, another width, or a number of words other than ``ceil(count * bits / 32)``.
    """
    _check_bits(bits)
    if words.dtype != torch.int32:
        raise ValueError(f"words must be int32, not {words.dtype}")
    dim %= words.ndim
    if words.shape[dim] != _words_for(count, bits):
        raise ValueError(f"{count} codes of {bits} bits take {_words_for(count, bits)} words, not {words.shape[dim]}")
    values, per_block = period(bits)
    blocks = -(-count // values)
    before, after = math.prod(words.shape[:dim]), math.prod(words.shape[dim + 1 :])
    flat = _padded(words.reshape(before, words.shape[dim], after), blocks * per_block)
    flat = flat.reshape(before, blocks, per_block, after)
    codes = torch.empty(before, blocks, values, after, dtype=torch.uint8, device=words.device)
    for k in range(values):
        word, shift = divmod(k * bits, WORD_BITS)
        value = flat[:, :, word] >> shift
        if shift + bits > WORD_BITS:
            low_bits = WORD_BITS - shift
            value = (value & ((1 << low_bits) - 1)) | (flat[:, :, word + 1] << low_bits)
        codes[:, :, k] = value & ((1 << bits) - 1)
    codes = codes.reshape(before, blocks * values, after)[:, :count]
    return codes.reshape(*words.shape[:dim], count, *words.shape[dim + 1 :]).contiguous()


def _check_bits(bits: int) -> None:
    if bits not in get_args(Bits):
        raise ValueError(f"bits must be one of {', '.join(map(str, get_args(Bits)))}; got {bits}")


def period(bits: int) -> tuple[int, int]:
    """Values and words after which the stream is aligned to a word again: (8, 1) at 4 bits, (32, 3) at 3 bits."""
    common = math.gcd(WORD_BITS, bits)
    return WORD_BITS // common, bits // common


def _words_for(count: int, bits: int) -> int:
    return -(-count * bits // WORD_BITS)


def _padded(flat: torch.Tensor, length: int) -> torch.Tensor:
    """`flat` [before, n, after] with zeros appended up to `length` in its middle dim; itself when already that long."""
    missing = length - flat.shape[1]
    return torch.nn.functional.pad(flat, (0, 0, 0, missing)) if missing else flat
