"""The Triton kernels in Triton's interpreter against float64. Run by test_kernels_interpreter.py in another process.

Activations, scales, zeros and bias lie between NaNs, words and results between numbers that would show; padded columns
hold NaN scales. QUANTFORGE_KERNELS=all takes every combination, not the subset in which each pair of settings occurs.
"""

import itertools
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantforge.errors import UsageError
from quantforge.kernels import planar, reference, rows
from quantforge.kernels.launch import launch_planar, planar_linear, round_tokens, target_of
from quantforge.kernels.tiles import Tile, planar_constants, planar_tile
from quantforge.kernels.tuning import candidates, tune_tile
from quantforge.kernels.w4a16 import w4a16_gated_triton, w4a16_linear_triton
from quantforge.kernels.w8a8 import w8a8_linear_triton
from quantforge.kernels.w8a16 import w8a16_gated_triton, w8a16_linear_triton

EVERYTHING = os.environ.get("QUANTFORGE_KERNELS") == "all"
GUARD = 512
"""Elements on either side of a tensor that must never matter."""

TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 5e-3, torch.float32: 1e-6}
"""Relative, of the norm: rounding the result alone is 3e-4 and, cut off as the interpreter makes bfloat16 of float32,
3e-3 (4.5e-3 were all results just above powers of two); weights are rounded too above 32 rows."""

BITS = (4, 8)
GROUPS = (32, 64, 128, -1)
DTYPES = (torch.float16, torch.bfloat16)
ROWS = (1, 2, 15, 16, 17, 64)
SHAPES = ((64, 256), (100, 336), (192, 576), (70, 201))
"""(out, in): whole blocks; ragged both; the plane of 16; inputs of an odd number, copied to be aligned."""


def covering() -> list[tuple[int, int, torch.dtype, int, tuple[int, int], bool]]:
    """All combinations, or few enough in which each value of one setting meets each of every other."""
    settings = (BITS, GROUPS, DTYPES, ROWS, SHAPES, (True, False))
    every = list(itertools.product(*settings))
    if EVERYTHING:
        return every
    chosen, left = [], {
        (i, a, j, b) for i, j in itertools.combinations(range(6), 2) for a in settings[i] for b in settings[j]
    }  # fmt: skip
    while left:
        gains = [sum((i, c[i], j, c[j]) in left for i, j in itertools.combinations(range(6), 2)) for c in every]
        best = every[gains.index(max(gains))]
        chosen.append(best)
        left -= {(i, best[i], j, best[j]) for i, j in itertools.combinations(range(6), 2)}
    return chosen


def guarded(values: Tensor) -> Tensor:
    """The same values in the middle of memory full of NaN, or of -1."""
    around = float("nan") if values.is_floating_point() else -1
    memory = torch.full((values.numel() + 2 * GUARD,), around, dtype=values.dtype)
    memory[GUARD:-GUARD] = values.flatten()
    return memory[GUARD:-GUARD].view(values.shape)


def problem(
    bits: int, group_size: int, dtype: torch.dtype, count: int, shape: tuple[int, int], symmetric: bool
) -> tuple[list[Tensor | None], Tensor]:
    """x, packed weight and bias, guarded; and the result in float64."""
    out_features, in_features = shape
    size = in_features if group_size == -1 else group_size
    groups = -(-in_features // size)
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    scales = (torch.rand(out_features, groups) * 0.02 + 0.005).to(dtype)
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8)
    if symmetric:
        zeros.fill_(1 << (bits - 1))
    x, bias = torch.randn(count, in_features).to(dtype), torch.randn(out_features).to(dtype)
    offsets = codes.double() - zeros.double().repeat_interleave(size, 1)[:, :in_features]
    weight = offsets * scales.double().repeat_interleave(size, 1)[:, :in_features]
    words, packed, kept = planar.pack(codes, scales, None if symmetric else zeros, bits=bits, group_size=group_size)
    packed[:, out_features:] = float("nan")
    inputs = [x, words, packed, kept, bias]
    return [None if value is None else guarded(value) for value in inputs], x.double() @ weight.T + bias.double()


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    error = (found.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize(("bits", "group_size", "dtype", "count", "shape", "symmetric"), covering())
def test_weight_only(
    bits: int, group_size: int, dtype: torch.dtype, count: int, shape: tuple[int, int], symmetric: bool
) -> None:
    (x, words, scales, zeros, bias), expected = problem(bits, group_size, dtype, count, shape, symmetric)
    linear = w4a16_linear_triton if bits == 4 else w8a16_linear_triton
    found = linear(x, words, scales, zeros, bias, group_size, shape[0])
    assert_close(found, expected, dtype)


@pytest.mark.parametrize(
    ("bits", "x_dtype", "scale_dtype", "count"),
    [
        (4, torch.bfloat16, torch.float16, 3),
        (8, torch.float16, torch.bfloat16, 3),
        (4, torch.float16, torch.bfloat16, 40),
    ],
)
def test_scales_of_another_16_bit_float(bits: int, x_dtype: torch.dtype, scale_dtype: torch.dtype, count: int) -> None:
    """A checkpoint's float16 scales in a bfloat16 model, and the reverse."""
    (x, words, scales, zeros, bias), _ = problem(bits, 64, scale_dtype, count, (100, 208), False)
    codes, scale, zero = planar.unpack(
        words, scales, zeros, bits=bits, group_size=64, out_features=100, in_features=208
    )
    expected = reference.linear(x.to(x_dtype), codes, scale, zero, bias, bits=bits, group_size=64)
    linear = w4a16_linear_triton if bits == 4 else w8a16_linear_triton
    assert_close(linear(x.to(x_dtype), words, scales, zeros, bias, 64, 100), expected, x_dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("after_dot", [False, True])
@pytest.mark.parametrize(
    ("bits", "dtype", "splits"), [(4, torch.float16, 1), (8, torch.float16, 4), (4, torch.bfloat16, 2)]
)
def test_tiles(bits: int, dtype: torch.dtype, splits: int, after_dot: bool, transposed: bool) -> None:
    (x, words, scales, zeros, bias), expected = problem(bits, 96, dtype, 18, (100, 480), False)
    tile = Tile(16, 64, after_dot=after_dot, transposed=transposed, splits=splits)
    found = planar_linear(x, words, scales, zeros, bias, bits=bits, group_size=96, out_features=100, tile=tile)
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("count", [3, 129])
def test_nothing_is_written_beside_the_result(count: int) -> None:
    (x, words, scales, zeros, bias), expected = problem(4, 64, torch.float16, count, (100, 208), False)
    memory = torch.full((count * 100 + 2 * GUARD,), 7.0, dtype=torch.float16)
    out = memory[GUARD:-GUARD].view(count, 100)
    width = planar.plane_width(4, 64, 208)
    tile = planar_tile(count, 128, words.shape[0] // width, "interpreter")
    constants = planar_constants(4, 64, width, 208, tile)
    launch_planar(x, words, scales, zeros, bias, out, 100, constants, tile, target_of(x.device), gated=False)
    assert_close(out, expected, torch.float16)
    assert (memory[:GUARD] == 7).all() and (memory[-GUARD:] == 7).all()


@pytest.mark.parametrize(
    ("bits", "dtype", "count"), [(4, torch.float16, 2), (8, torch.bfloat16, 17), (4, torch.float16, 65)]
)
def test_gate_up_silu(bits: int, dtype: torch.dtype, count: int) -> None:
    (x, words, scales, zeros, _), _ = problem(bits, 64, dtype, count, (136, 256), False)
    linear = w4a16_linear_triton if bits == 4 else w8a16_linear_triton
    plain = linear(x, words, scales, zeros, None, 64, 136).double()  # no rounding of its own beyond the result's
    gated = w4a16_gated_triton if bits == 4 else w8a16_gated_triton
    found = gated(x, words, scales, zeros, 64, 136)
    assert_close(found, torch.nn.functional.silu(plain[:, ::2]) * plain[:, 1::2], dtype)


def test_three_matrices_are_one_launch_when_stacked() -> None:
    parts = []
    for count in (64, 32, 32):
        codes, zeros = (torch.randint(0, 16, (count, width), dtype=torch.uint8) for width in (128, 2))
        parts.append((codes, torch.rand(count, 2).to(torch.float16), zeros))
    x = torch.randn(2, 3, 128).to(torch.float16)
    stacked = planar.pack(*(torch.cat(values) for values in zip(*parts, strict=True)), bits=4, group_size=64)
    found = w4a16_linear_triton(x, *stacked, None, 64, 128)
    assert found.shape == (2, 3, 128)
    apart = [
        w4a16_linear_triton(x, *planar.pack(*part, bits=4, group_size=64), None, 64, len(part[0])) for part in parts
    ]
    assert torch.equal(found, torch.cat(apart, dim=-1))


@pytest.mark.parametrize(
    ("dtype", "count", "shape"),
    [
        (torch.float16, 1, (64, 128)),
        (torch.bfloat16, 16, (100, 200)),
        (torch.float32, 17, (70, 300)),
        (torch.float16, 65, (64, 200)),
    ],
)
def test_w8a8(dtype: torch.dtype, count: int, shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    scales = (torch.rand(shape[0], 1) * 0.01 + 0.001).to(dtype)
    bias, x = torch.randn(shape[0]).to(dtype), torch.randn(count, shape[1]).to(dtype)
    x[0, : shape[1] // 2] = 0
    weight, packed = rows.pack(codes, scales)
    packed[shape[0] :] = float("nan")
    step = x.float().abs().amax(1, keepdim=True) / 127.5
    rounded = (x.float() / step).clamp(-128, 127).round()
    expected = (rounded.double() @ (codes.double() - 128).T) * step.double() * scales.double().T + bias.double()
    found = w8a8_linear_triton(guarded(x), guarded(weight), guarded(packed), guarded(bias), shape[0])
    assert_close(found, expected, dtype)


def test_tokens_are_rounded_as_in_evaluation() -> None:
    from quantforge.numerics.activations import quantize_tokens
    from quantforge.spec import ActivationSpec

    x = torch.randn(5, 1100)
    x[1] = 0
    x[2, :8] = torch.tensor([127.5, 0.5, 1.5, 2.5, -0.5, -1.5, -127.5, 127.0])
    x[2, 8:] = 0
    codes, steps = round_tokens(guarded(x), 1152)
    assert codes[2, :8].tolist() == [127, 0, 2, 2, 0, -2, -128, 127]
    assert not codes[:, 1100:].any() and not codes[1].any()
    assert torch.equal(codes[:, :1100] * steps[:, None], quantize_tokens(x.clone(), ActivationSpec(8)))


def test_tuning_takes_the_quickest_tile_and_every_candidate_is_right() -> None:
    (x, words, scales, zeros, _), _ = problem(4, 64, torch.float16, 2, (128, 256), False)
    bias_free = planar_linear(x, words, scales, zeros, None, bits=4, group_size=64, out_features=128)
    times = iter([3.0, 2.0, 1.0, *[5.0] * 20])
    seen = []

    def timed(call: Callable[[], Tensor]) -> float:
        seen.append(call())
        return next(times)

    sizes = {"bits": 4, "group_size": 64}
    tiles = list(candidates(x, words, **sizes))
    assert tune_tile(x, words, scales, zeros, **sizes, out_features=128, timer=timed) == (tiles[2], 1.0)
    assert len(seen) == len(tiles) == len(set(tiles)) >= 6
    for found in seen:
        assert_close(found, bias_free.double(), torch.float16)
    with pytest.raises(UsageError, match="timed on a GPU, and x is on cpu"):
        tune_tile(x, words, scales, zeros, **sizes, out_features=128)


def test_no_rows_are_no_launch_and_errors_name_the_shapes() -> None:
    (x, words, scales, zeros, bias), _ = problem(4, 64, torch.float16, 2, (100, 200), False)
    assert w4a16_linear_triton(x[:0], words, scales, zeros, bias, 64, 100).shape == (0, 100)
    with pytest.raises(ValueError, match="float16 and bfloat16"):
        w4a16_linear_triton(x.float(), words, scales, zeros, bias, 64, 100)
    with pytest.raises(ValueError, match=r"100 x 200 of 8 bits, group 64, are int16"):
        w8a16_linear_triton(x, words, scales, zeros, bias, 64, 100)
    with pytest.raises(ValueError, match=r"scales are torch.float16 \(4, 64\); expected torch.float16 \(4, 128\)"):
        w4a16_linear_triton(x, words, scales[:, :64], None, bias, 64, 100)
    with pytest.raises(ValueError, match=r"bias is \(99,\); expected \(100,\)"):
        w4a16_linear_triton(x, words, scales, zeros, bias[:99], 64, 100)
    with pytest.raises(ValueError, match="not the packed form of 100 x 200"):
        w8a8_linear_triton(x, torch.zeros(64, 256, dtype=torch.int8), torch.ones(64), None, 100)
