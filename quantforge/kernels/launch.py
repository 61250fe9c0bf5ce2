"""Launching the Triton kernels on a GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantforge.kernels import rows
from quantforge.kernels.planar import group_count, inputs_read, padded_shape, plane_width, planes_of, whole_group
from quantforge.kernels.tiles import Tile, int8_tile, planar_constants, planar_tile

COMBINED = 1024
"""Elements that one program of `combine` adds up."""

FLOATS = (torch.float16, torch.bfloat16)


def planar_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    *,
    bits: int,
    group_size: int,
    out_features: int,
    gated: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """``x @ dequantized.T + bias`` from the planar layout.

    Args:
        x: [..., in], float16 or bfloat16.
        words, scales, zeros: as `planar.pack` makes them, on the device of `x`.
        bias: [out_features], or None.
        gated: out features alternate gate and up; the result is ``silu(gate) * up``, half as wide.
        tile: None takes it from the table.

    Returns:
        [..., out_features], or half of that when gated, in the dtype of `x`. Sums are float32.

    Raises:
        ValueError: another dtype, or shapes that do not belong together.
    """
    in_features = x.shape[-1]
    _check(x, words, scales, zeros, bias, bits, group_size, out_features)
    if gated and out_features % 2:
        raise ValueError(f"gate and up are equally many, not {out_features} together")
    flat = x.reshape(-1, in_features).contiguous()
    if (added := inputs_read(bits, group_size, in_features) - in_features) > 0:
        flat = torch.nn.functional.pad(flat, (0, added))
    group, width = whole_group(group_size, in_features), plane_width(bits, group_size, in_features)
    blocks = words.shape[0] // width
    count, columns = flat.shape[0], words.shape[1]
    target = target_of(x.device)
    tile = tile or planar_tile(count, columns, blocks, target)
    out = x.new_empty((*x.shape[:-1], out_features // 2 if gated else out_features))
    if count == 0:
        return out
    constants = planar_constants(bits, group, width, flat.shape[1], tile)
    launch_planar(flat, words, scales, zeros, bias, out, out_features, constants, tile, target, gated=gated)
    return out


def launch_planar(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    out_features: int,
    constants: dict[str, Any],
    tile: Tile,
    target: str,
    *,
    gated: bool,
) -> None:
    """`x` [rows, in] into `out`, which has as many rows; nothing is checked."""
    from quantforge.kernels.sources import planar as source

    count, columns = x.shape[0], words.shape[1]
    grid = (columns // tile.block_n, -(-count // tile.block_m), tile.splits)
    summed = x.new_empty((tile.splits, count, out_features), dtype=torch.float32) if tile.splits > 1 else out
    with _current(x):
        source.planar_matmul[grid](
            x, words, scales, zeros, bias, summed, count, out_features, x.shape[1], columns,
            **constants, GATED=gated, PTX=target.startswith("sm_"), COMPUTE=compute_dtype(x),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if tile.splits > 1:
            source.combine[(-(-out.numel() // COMBINED),)](
                summed, bias, out, count, out_features, SPLITS=tile.splits, GATED=gated, BLOCK=COMBINED
            )


def int8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, *, out_features: int, tile: Tile | None = None
) -> Tensor:
    """``round(x) @ (weight * scales).T + bias``: tokens rounded to INT8, the product in integers, exact.

    Args:
        x: [..., in], float16, bfloat16 or float32.
        weight, scales: as `rows.pack` makes them, on the device of `x`.

    Returns:
        [..., out_features] in the dtype of `x`.

    Raises:
        ValueError: shapes that do not belong together, or more inputs than an int32 can sum.
    """
    from quantforge.kernels.sources import int8 as source

    in_features, padded = x.shape[-1], weight.shape[1]
    fits = padded == rows.padded_inputs(in_features) and weight.shape[0] >= out_features
    if not fits or scales.shape != weight.shape[:1]:
        raise ValueError(f"weight {tuple(weight.shape)} is not the packed form of {out_features} x {in_features}")
    flat = x.reshape(-1, in_features).contiguous()
    count, columns = flat.shape[0], weight.shape[0]
    target = target_of(x.device)
    tile = tile or int8_tile(count, columns, padded // rows.BLOCK, target)
    out = x.new_empty((*x.shape[:-1], out_features))
    if count == 0:
        return out
    codes, steps = round_tokens(flat, padded)
    split = tile.splits > 1
    summed = x.new_empty((tile.splits, count, out_features), dtype=torch.int32) if split else out
    grid = (columns // tile.block_n, -(-count // tile.block_m), tile.splits)
    with _current(x):
        source.int8_matmul[grid](
            codes, weight, steps, scales, bias, summed, count, out_features, padded,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=rows.BLOCK, PARTIAL=split,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if split:
            source.combine_int8[(-(-out.numel() // COMBINED),)](
                summed, steps, scales, bias, out, count, out_features, SPLITS=tile.splits, BLOCK=COMBINED
            )
    return out


def round_tokens(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """Each row of `x` [rows, in] on its own symmetric grid: int8 [rows, padded], zeros after `in`, and float32 [rows].

    The step is ``max |x| / 127.5``, as in `numerics.activations.quantize_tokens`, computed in float32.
    """
    from quantforge.kernels.sources import int8 as source

    codes = x.new_empty((x.shape[0], padded), dtype=torch.int8)
    steps = x.new_empty((x.shape[0],), dtype=torch.float32)
    with _current(x):
        source.round_tokens[(x.shape[0],)](x, codes, steps, x.shape[1], padded, BLOCK=1024, num_warps=4)
    return codes, steps


def compute_dtype(x: Tensor) -> Any:
    """What the kernel multiplies in: the dtype of `x`; float32 for bfloat16 in the interpreter, which adds its bits."""
    import triton.language as tl

    if x.dtype == torch.float16:
        return tl.float16
    return tl.bfloat16 if x.is_cuda else tl.float32


AMD = ("gfx90a", "gfx942", "gfx950")
"""AMD's GPUs with the matrix instructions that the kernels are made for; gfx11 has others, and spills registers."""


@cache
def target_of(device: torch.device) -> str:
    """``sm_90``, ``gfx942``, ..., or ``interpreter`` for the CPU; ValueError for a GPU that no kernel is made for."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
        if name not in AMD:
            raise ValueError(f"no kernel runs on {device}, a {name}; they need one of {', '.join(AMD)}")
        return name
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(f"no kernel runs on {device}, an sm_{major}{minor}; they need sm_80 or newer")
    return f"sm_{major}{minor}"


def _current(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels go to the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _check(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    out_features: int,
) -> None:
    if x.dtype not in FLOATS or scales.dtype not in FLOATS:
        raise ValueError(f"x is {x.dtype}, scales are {scales.dtype}; the kernels take float16 and bfloat16")
    padded_out, padded_in = padded_shape(bits, group_size, out_features, x.shape[-1])
    expected = (padded_in // planes_of(bits), padded_out)
    if tuple(words.shape) != expected or words.dtype != torch.int16:
        raise ValueError(
            f"words are {words.dtype} {tuple(words.shape)}; {out_features} x {x.shape[-1]} of {bits} bits, group "
            f"{group_size}, are int16 {expected}"
        )
    if words.numel() >= 1 << 31:
        raise ValueError(f"words {expected} are more than a kernel can count in 32 bits")
    corners = (group_count(whole_group(group_size, x.shape[-1]), padded_in), padded_out)
    for name, values in (("scales", scales), ("zeros", zeros)):
        if values is not None and (tuple(values.shape) != corners or values.dtype != scales.dtype):
            raise ValueError(f"{name} are {values.dtype} {tuple(values.shape)}; expected {scales.dtype} {corners}")
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise ValueError(f"bias is {tuple(bias.shape)}; expected {(out_features,)}")
