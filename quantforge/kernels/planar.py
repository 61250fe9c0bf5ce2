"""The planar layout that the Triton kernels read: codes of 4 or 8 bits as planes of 16-bit words.

A *plane* is `width` consecutive inputs of the matrix. A word holds one code of each of ``16 / bits`` planes, so a block
of 4 planes (4 bits) or 2 planes (8 bits) is one slab of `width` rows of words, and out features run along a row::

    4 bits, width 32: inputs 0 .. 127 of out feature n            8 bits, width 64: inputs 0 .. 127

          bits 15..12  11..8    7..4    3..0                            bits 15..8   7..0
    row  0    k=96     k=64     k=32    k=0      words[0, n]      row  0    k=64     k=0
    row  1    k=97     k=65     k=33    k=1      words[1, n]      row  1    k=65     k=1
     ...                                                           ...
    row 31    k=127    k=95     k=63    k=31     words[31, n]     row 63    k=127    k=63
             plane 3  plane 2  plane 1 plane 0                             plane 1  plane 0

    inputs 128 .. 255 follow in rows 32 .. 63                     inputs 128 .. 255 follow in rows 64 .. 127

Plane i of a block is a matrix [width, out] of its own, ``(words >> bits * i) & mask``, and multiplies `width` adjacent
inputs: nothing is ever shuffled. Two words that are neighbours along the inputs share a 32-bit register after
``ldmatrix.trans``, as the tensor cores want two 16-bit weights, so one instruction takes a plane of both.

`width` is one of `WIDTHS` that divides a group, so that a plane has one scale. Inputs are padded to whole blocks and
out features to a multiple of 64; what is added has codes, scales and zeros of 0. Scales are [groups, out], zeros alike,
in the same dtype (8-bit numbers beside 16-bit words would cost the matrix loads), None where all are ``2^(bits-1)``.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

WIDTHS = {4: (32, 16), 8: (64, 32, 16)}
"""By bits, widest first. The wider, the fewer instructions; the narrower, the less padding."""

COLUMNS = 64
"""Out features are padded to a multiple of this."""

WHOLE_ROW = -1
"""The group size of one scale per out feature."""


def plane_width(bits: int, group_size: int, in_features: int) -> int:
    """The widest plane that divides a group and pads the inputs by at most a sixteenth more than the best does.

    Raises ValueError for bits other than 4 and 8, and for a group that is no multiple of 16.
    """
    planes = planes_of(bits)
    group = whole_group(group_size, in_features)
    fitting = [width for width in WIDTHS[bits] if group == WHOLE_ROW or group % width == 0]
    if not fitting:
        raise ValueError(f"the planar layout needs groups of a multiple of 16 inputs, not of {group_size}")
    padded = {width: _up(in_features, planes * width) for width in fitting}
    least = min(padded.values())
    return next(width for width in fitting if padded[width] <= least + least // 16)


def planes_of(bits: int) -> int:
    """Planes in a word: 4 at 4 bits, 2 at 8 bits. Raises ValueError for other widths."""
    if bits not in (4, 8):
        raise ValueError(f"the planar layout holds 4 or 8 bits, not {bits}")
    return 16 // bits


def whole_group(group_size: int, in_features: int) -> int:
    """`group_size`, or WHOLE_ROW when one group takes the whole row; ValueError unless positive or WHOLE_ROW."""
    if group_size < 1 and group_size != WHOLE_ROW:
        raise ValueError(f"group_size must be positive, or {WHOLE_ROW} for the whole row; got {group_size}")
    return WHOLE_ROW if group_size >= in_features else group_size


def group_inputs(group_size: int, in_features: int) -> int:
    """Inputs that share a scale: `group_size`, or all where one group takes the row; ValueError as `whole_group`."""
    group = whole_group(group_size, in_features)
    return in_features if group == WHOLE_ROW else group


def group_count(group: int, inputs: int) -> int:
    """Groups that `inputs` fall into, the last perhaps short; `group` is one of `whole_group`."""
    return 1 if group == WHOLE_ROW else -(-inputs // group)


def padded_shape(bits: int, group_size: int, out_features: int, in_features: int) -> tuple[int, int]:
    """(out, in) after padding."""
    block = planes_of(bits) * plane_width(bits, group_size, in_features)
    return _up(out_features, COLUMNS), _up(in_features, block)


def inputs_read(bits: int, group_size: int, in_features: int) -> int:
    """Inputs of the activations as a kernel is given them: rows that begin at no multiple of 32 bytes are padded."""
    return in_features if in_features % 16 == 0 else padded_shape(bits, group_size, 1, in_features)[1]


def pack(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, group_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Lay out a quantized matrix for the kernels.

    Args:
        codes: uint8 [out, in], each below ``2^bits``.
        scales: [out, groups], floating; kept in its dtype. Groups tile the inputs in order; the last may be short.
        zeros: uint8 [out, groups]; None when all are ``2^(bits-1)``.
        group_size: inputs that share a scale; -1, or anything from `in` up, for one scale per out feature.

    Returns:
        words int16 [padded in * bits / 16, padded out], scales [padded groups, padded out], zeros alike or None; all
        contiguous, on the device of `codes`.

    Raises:
        ValueError: another dtype or shape, a code too large, or a group that no plane fits into.
    """
    out_features, in_features = codes.shape
    group = whole_group(group_size, in_features)
    planes, width = planes_of(bits), plane_width(bits, group_size, in_features)
    _check(codes, scales, zeros, bits, group)
    padded_out, padded_in = padded_shape(bits, group_size, out_features, in_features)
    whole = pad(codes, (0, padded_in - in_features))
    blocks = whole.view(out_features, -1, planes, width)
    if bits == 4:
        low, high = (blocks[:, :, i] | (blocks[:, :, i + 1] << 4) for i in (0, 2))
    else:
        low, high = blocks[:, :, 0], blocks[:, :, 1]
    words = torch.stack([low, high], dim=-1).view(torch.int16).reshape(out_features, -1)  # bytes, little endian
    groups = group_count(group, padded_in)
    missing = (0, groups - scales.shape[1], 0, padded_out - out_features)
    return (
        pad(words.t(), (0, padded_out - out_features)).contiguous(),
        pad(scales, missing).t().contiguous(),
        None if zeros is None else pad(zeros, missing).t().to(scales.dtype).contiguous(),
    )


def unpack(
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    group_size: int,
    out_features: int,
    in_features: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The codes, scales and zeros that `pack` was given, exactly; padding is left out.

    Raises ValueError when `words` is not of the shape that these settings give.
    """
    planes, width = planes_of(bits), plane_width(bits, group_size, in_features)
    padded_out, padded_in = padded_shape(bits, group_size, out_features, in_features)
    if words.dtype != torch.int16 or tuple(words.shape) != (padded_in // planes, padded_out):
        raise ValueError(f"words are {words.dtype} {tuple(words.shape)}, not int16 {(padded_in // planes, padded_out)}")
    halves = words[:, :out_features].t().contiguous().view(torch.uint8).view(out_features, -1, width, 2)
    low, high = halves[..., 0], halves[..., 1]  # [out, blocks, width]
    split = [low & 15, low >> 4, high & 15, high >> 4] if bits == 4 else [low, high]
    codes = torch.stack(split, dim=2).view(out_features, -1)[:, :in_features].contiguous()
    groups = group_count(whole_group(group_size, in_features), in_features)

    def trimmed(values: Tensor) -> Tensor:
        return values[:groups, :out_features].t().contiguous()

    return codes, trimmed(scales), None if zeros is None else trimmed(zeros).to(torch.uint8)


def _check(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int) -> None:
    out_features, in_features = codes.shape
    if codes.dtype != torch.uint8 or (zeros is not None and zeros.dtype != torch.uint8):
        raise ValueError(f"codes and zeros must be uint8; codes are {codes.dtype}")
    groups = group_count(group, in_features)
    for name, values in (("scales", scales), ("zeros", zeros)):
        if values is not None and tuple(values.shape) != (out_features, groups):
            raise ValueError(f"{name} are {tuple(values.shape)}, not {(out_features, groups)}")
    if codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"code {int(codes.max())} does not fit in {bits} bits")


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of two equal matrices in turn: gate 0, up 0, gate 1, ...; for codes, scales and zeros, before `pack`."""
    return torch.stack([gate, up], dim=1).flatten(0, 1)
