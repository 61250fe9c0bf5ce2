"""Which tile a matrix product is cut into, by rows of activations and hardware: a table, nothing is timed at run time.

The rows were chosen by what the compiler makes of them (docs/kernels.md): no spilled register, weights loaded 16 bytes
at a time, few instructions per weight. No GPU has timed them. `tuning.tune_tile` does where there is one, when asked.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from quantforge.kernels.planar import WHOLE_ROW, planes_of

PROGRAMS = 264
"""Programs at which a product of few rows stops being split along its inputs: two for each processor of an H100."""

MOST_SPLITS = 8


@dataclass(frozen=True)
class Tile:
    """How one launch is cut up.

    Attributes:
        block_m, block_n: rows of activations and out features of one program.
        warps: per program.
        stages: blocks of inputs that are on their way at once.
        after_dot: scale partial sums of a group in float32, not the weights before the product.
        transposed: weights are the first operand of the matrix instruction.
        splits: programs that share one tile, each with a part of the inputs; their sums are added in a fixed order.
    """

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 3
    after_dot: bool = False
    transposed: bool = False
    splits: int = 1


@dataclass(frozen=True)
class Row:
    """`tile` serves up to `rows` rows of activations on targets whose names begin with `target`; all begin with ""."""

    rows: int
    tile: Tile
    target: str = ""


UNLIMITED = 1 << 62

SMALL = ("sm_86", "sm_89", "sm_120")
"""Targets whose programs can have 99 kB of shared memory, which three stages of a large tile exceed at 8 bits."""

PLANAR = (
    Row(16, Tile(16, 128, after_dot=True)),
    Row(32, Tile(32, 128, after_dot=True)),
    Row(64, Tile(64, 128, transposed=True), "sm_90"),
    Row(64, Tile(64, 128)),
    *(Row(UNLIMITED, Tile(128, 128, warps=8, stages=2, transposed=True), target) for target in SMALL),
    Row(UNLIMITED, Tile(128, 128, warps=8, transposed=True)),
)
"""The first row that fits counts."""

INT8 = (
    Row(16, Tile(16, 64)),
    Row(64, Tile(64, 128)),
    Row(UNLIMITED, Tile(128, 128, warps=8)),
)
"""The same for INT8 activations; a block there is `rows.BLOCK` inputs."""


def planar_tile(rows: int, columns: int, blocks: int, target: str) -> Tile:
    """The tile for `rows` of activations and padded `columns` of `blocks` blocks of planes, splits included.

    `target` is ``sm_90``, ``gfx942``, ... as in `aot.TARGETS`.
    """
    return _chosen(PLANAR, rows, columns, blocks, target)


def int8_tile(rows: int, columns: int, blocks: int, target: str) -> Tile:
    """The tile for INT8 activations."""
    return _chosen(INT8, rows, columns, blocks, target)


def _chosen(table: tuple[Row, ...], rows: int, columns: int, blocks: int, target: str) -> Tile:
    """With whole tiles of out features, splits enough to fill the machine, and the stages that AMD's compiler takes."""
    tile = next(row.tile for row in table if rows <= row.rows and target.startswith(row.target))
    block_n = math.gcd(tile.block_n, columns)
    programs = (columns // block_n) * -(-rows // tile.block_m)
    splits = 1
    while splits < MOST_SPLITS and programs * splits * 2 <= PROGRAMS and splits * 2 <= blocks:
        splits *= 2
    return replace(tile, block_n=block_n, splits=splits, stages=2 if target.startswith("gfx") else tile.stages)


def planar_constants(bits: int, group: int, width: int, in_features: int, tile: Tile) -> dict[str, Any]:
    """The compile-time arguments of `sources.planar.planar_matmul` that do not depend on hardware or dtype.

    `group` is one of `planar.whole_group`.
    """
    planes = planes_of(bits)
    whole_row = group == WHOLE_ROW
    return {
        "GROUP": 0 if whole_row else group,
        "BITS": bits,
        "PLANE": width,
        "CHUNK": planes if whole_row else math.gcd(group, planes * width) // width,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "AFTER_DOT": tile.after_dot,
        "TRANSPOSED": tile.transposed,
        "WHOLE_K": in_features % (planes * width) == 0,
        "PARTIAL": tile.splits > 1,
        "STAGES": tile.stages,
    }
