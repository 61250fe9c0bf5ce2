"""Timing tiles on the machine's own GPU, for a program that asks for it. Without asking, `tiles` alone decides."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from quantforge.errors import UsageError
from quantforge.kernels.launch import planar_linear, target_of
from quantforge.kernels.planar import plane_width
from quantforge.kernels.tiles import MOST_SPLITS, Tile, planar_tile

Timer = Callable[[Callable[[], Tensor]], float]
"""Milliseconds that a call takes."""


def tune_tile(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    group_size: int,
    out_features: int,
    timer: Timer | None = None,
) -> tuple[Tile, float]:
    """The quickest tile for a product of this shape, and its milliseconds; arguments as of `launch.planar_linear`.

    Pass the tile to `planar_linear`. Each candidate is compiled, which takes seconds. UsageError without a GPU, unless
    a `timer` is given.
    """
    if timer is None:
        if not x.is_cuda:
            raise UsageError(f"tiles are timed on a GPU, and x is on {x.device}")
        from triton.testing import do_bench

        timer = do_bench
    times = {}
    for tile in candidates(x, words, bits=bits, group_size=group_size):
        call = partial(
            planar_linear, x, words, scales, zeros, None,
            bits=bits, group_size=group_size, out_features=out_features, tile=tile,
        )  # fmt: skip
        times[tile] = timer(call)
    best = min(times, key=lambda tile: times[tile])
    return best, times[best]


def candidates(x: Tensor, words: Tensor, *, bits: int, group_size: int) -> Iterator[Tile]:
    """The table's tile first, then others: more or fewer splits, stages and warps, half the out features."""
    width = plane_width(bits, group_size, x.shape[-1])
    rows, blocks = x.numel() // x.shape[-1], words.shape[0] // width
    first = planar_tile(rows, words.shape[1], blocks, target_of(x.device))
    tiles = [first]
    tiles += [replace(first, splits=1 << power) for power in range(MOST_SPLITS.bit_length()) if 1 << power <= blocks]
    tiles += [replace(tile, stages=stages) for tile in tiles[:1] for stages in (2, 4)]
    tiles += [replace(first, warps=warps) for warps in (4, 8)]
    if first.block_n == 128:
        tiles.append(replace(first, block_n=64))
    yield from dict.fromkeys(tiles)
