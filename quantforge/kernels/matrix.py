"""Kernels as they are launched, as builds to compile ahead of time: what the tables of `tiles` give for a matrix."""

from typing import Any, Literal

from quantforge.kernels import rows as int8_layout
from quantforge.kernels.aot import Build
from quantforge.kernels.planar import inputs_read, padded_shape, plane_width, planes_of, whole_group
from quantforge.kernels.tiles import int8_tile, planar_constants, planar_tile

LONG = 4096
"""Inputs and out features of a build for no matrix in particular."""

Dtype = Literal["fp16", "bf16"]


def planar_build(
    target: str,
    bits: int,
    group_size: int,
    *,
    rows: int,
    dtype: Dtype = "fp16",
    symmetric: bool = False,
    bias: bool = False,
    gated: bool = False,
    out_features: int = LONG,
    in_features: int = LONG,
) -> Build:
    """The kernel for up to `rows` of activations times one matrix, as `launch.planar_linear` would compile it."""
    width = plane_width(bits, group_size, in_features)
    columns, padded_in = padded_shape(bits, group_size, out_features, in_features)
    tile = planar_tile(rows, columns, padded_in // width // planes_of(bits), target)
    group, read = whole_group(group_size, in_features), inputs_read(bits, group_size, in_features)
    constants: dict[str, Any] = planar_constants(bits, group, width, read, tile)
    absent = {"zeros": None} if symmetric else {}
    if tile.splits > 1 or not bias:
        absent["bias"] = None
    return Build(
        "planar_matmul",
        target,
        dtype,
        tuple({**constants, **absent, "GATED": gated}.items()),
        out="fp32" if tile.splits > 1 else dtype,
        warps=tile.warps,
        stages=tile.stages,
        aligned=("N",) if out_features % 16 == 0 else (),
        grid=(columns // tile.block_n, tile.block_m, tile.splits),
    )


def combine_build(build: Build, *, bias: bool = False) -> Build:
    """The kernel that adds up what `build`, of several splits, leaves."""
    fixed = {"SPLITS": build.grid[2], "BLOCK": 1024} | ({} if bias else {"bias": None})
    entry: Literal["combine", "combine_int8"] = "combine"
    if build.entry == "int8_matmul":
        entry = "combine_int8"
    else:
        fixed["GATED"] = build.known["GATED"]
    return Build(entry, build.target, build.dtype, tuple(fixed.items()), out=build.dtype, grid=(0, 0, 1))


def int8_build(
    target: str,
    *,
    rows: int,
    dtype: Dtype = "fp16",
    bias: bool = False,
    out_features: int = LONG,
    in_features: int = LONG,
) -> Build:
    """The same for INT8 activations."""
    columns = out_features + -out_features % 64
    tile = int8_tile(rows, columns, int8_layout.padded_inputs(in_features) // int8_layout.BLOCK, target)
    split = tile.splits > 1
    constants: dict[str, Any] = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": int8_layout.BLOCK,
        "PARTIAL": split,
    }
    if split or not bias:
        constants["bias"] = None
    return Build(
        "int8_matmul",
        target,
        dtype,
        tuple(constants.items()),
        out="i32" if split else dtype,
        warps=tile.warps,
        stages=tile.stages,
        aligned=("N",) if out_features % 16 == 0 else (),
        grid=(columns // tile.block_n, tile.block_m, tile.splits),
    )


def round_tokens_build(target: str, dtype: Dtype) -> Build:
    """The kernel that rounds activations to INT8."""
    return Build("round_tokens", target, dtype, (("BLOCK", 1024),), out=dtype, grid=(1, 1, 1))
