"""Grids: scales that can be stored, ranges that are covered, codes that are nearest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quantforge.errors import NumericsError
from quantforge.numerics.grid import (
    SHRINKS,
    choose_codes,
    grid_from_range,
    largest_scale,
    minmax_grid,
    searched_grid,
    store_scale,
    store_signed_scale,
)
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SPECS = [
    QuantSpec(bits, group_size, symmetric, scale_dtype)
    for bits in (2, 3, 4, 8)
    for group_size in (8, None)
    for symmetric in (True, False)
    for scale_dtype in ("float16", "bfloat16")
] + [QuantSpec(4, group_size, False, "float16", exact_minima=True) for group_size in (8, None)]


def rounded(weight: Tensor, spec: QuantSpec) -> QuantizedWeight:
    scale, zero = minmax_grid(weight, spec)
    return QuantizedWeight(spec, choose_codes(weight, scale, zero, spec), scale, zero)


def worst_error_in_scales(weight: Tensor, spec: QuantSpec) -> float:
    grid = rounded(weight, spec)
    error = (weight - grid.dequantize()).abs().reshape(*grid.scale.shape, -1)
    return float((error / grid.scale.float().unsqueeze(-1)).max())


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
def test_every_stored_scale_is_a_positive_finite_float16_number(scale_dtype: str) -> None:
    exponents = torch.linspace(-150, 120, 40001, dtype=torch.float64)
    stored = store_scale(torch.exp2(exponents), QuantSpec(4, scale_dtype=scale_dtype))  # type: ignore[arg-type]
    assert stored.dtype == DTYPES[scale_dtype]
    assert torch.equal(stored.double(), stored.double().half().double())
    assert float(stored.min()) == 2**-24
    assert float(stored.max()) == {"float16": 65504, "bfloat16": 65280}[scale_dtype]


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
def test_every_storable_scale_is_stored_unchanged(scale_dtype: str) -> None:
    every_half = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    storable = every_half[every_half.to(DTYPES[scale_dtype]).float() == every_half]
    assert torch.equal(store_scale(storable, QuantSpec(4, scale_dtype=scale_dtype)).float(), storable)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
def test_a_scale_below_or_above_the_storable_range_saturates(scale_dtype: str) -> None:
    largest = {"float16": 65504.0, "bfloat16": 65280.0}[scale_dtype]
    spec = QuantSpec(4, scale_dtype=scale_dtype)  # type: ignore[arg-type]
    stored = store_scale(torch.tensor([0.0, 1e-30, 65400.0, 1e30]), spec)
    assert stored[[0, 1, 3]].tolist() == [2**-24, 2**-24, largest]
    assert largest - 128 <= float(stored[2]) <= largest


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(NumericsError, match="1 of 2 scales"):
        store_scale(torch.tensor([1.0, value]), QuantSpec(4, scale_dtype="float16"))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
def test_exact_minima_are_float16_numbers_for_every_zero_and_scale(bits: int, scale_dtype: str) -> None:
    spec = QuantSpec(bits, None, False, scale_dtype, exact_minima=True)  # type: ignore[arg-type]
    every_half = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    stored = store_scale(every_half, spec)
    minima = stored.float().unsqueeze(1) * torch.arange(2**bits)
    assert stored.dtype == DTYPES[scale_dtype] and torch.equal(minima.half().float(), minima)
    reached = every_half <= largest_scale(spec)
    change = (stored.float() / every_half - 1).abs()[reached & (every_half >= 2.0**-14)]
    assert float(change.max()) <= 2.0**-spec.scale_digits
    assert torch.equal(store_scale(stored.float(), spec), stored)
    turned = store_signed_scale(-every_half, spec)
    assert torch.equal(turned, -stored)


def test_the_largest_scale_of_exact_minima_leaves_room_for_the_largest_zero() -> None:
    spec = QuantSpec(4, None, symmetric=False, scale_dtype="float16", exact_minima=True)
    assert (spec.scale_digits, largest_scale(spec)) == (7, 4352.0)
    assert 15 * 4352 <= 65504 < 15 * (4352 + 64)
    weight = torch.tensor([[0.0, 15 * 4352.0]])
    assert float(minmax_grid(weight, spec)[0]) == 4352
    with pytest.raises(NumericsError, match=r"4-bit grid with float16 scales reaches 6\.528e\+04"):
        minmax_grid(weight * 1.05, spec)


def test_a_rounded_scale_that_would_be_too_short_takes_the_next_one_of_so_many_digits() -> None:
    spec = QuantSpec(8, None, symmetric=False, scale_dtype="float16", exact_minima=True)
    assert spec.scale_digits == 3
    scale, _ = minmax_grid(torch.tensor([[0.0, 255 * 4.4], [0.0, 255 * 4.0], [0.0, 255 * 7.4]]), spec)
    assert scale.tolist() == [[5.0], [4.0], [8.0]]  # nearest are 4, 4 and 7
    symmetric = QuantSpec(4, None, scale_dtype="float16", exact_minima=True)
    assert symmetric.scale_digits == 11 and float(store_scale(torch.tensor(1 + 2.0**-10), symmetric)) == 1 + 2.0**-10


def test_symmetric_scale_is_twice_the_largest_magnitude_over_the_code_range() -> None:
    weight = torch.tensor([[1.0, -7.5, 3.0, 2.0], [0.5, 0.25, -0.125, 0.0]])
    scale, zero = minmax_grid(weight, QuantSpec(4, 2, symmetric=True, scale_dtype="float16"))
    assert torch.equal(scale, (torch.tensor([[15.0, 6.0], [1.0, 0.25]]) / 15).half())
    assert torch.equal(zero, torch.full((2, 2), 8, dtype=torch.uint8))


def test_asymmetric_zero_is_chosen_against_the_stored_scale() -> None:
    weight = torch.tensor([[-1.0, 2.0]])
    scale, zero = minmax_grid(weight, QuantSpec(8, 2, symmetric=False, scale_dtype="bfloat16"))
    assert float(scale) == float(torch.tensor(3 / 255).half().bfloat16())
    assert int(zero) == round(1.0 / float(scale)) == 85


@pytest.mark.parametrize(
    ("weight", "largest_error"),
    [
        (torch.arange(10.5, 14.5, 0.5), 0.44),
        (torch.linspace(1, 2, 8), 0.067),
        (torch.linspace(-2, -1, 8), 0.067),
    ],
    ids=["10.5 to 14", "1 to 2", "-2 to -1"],
)
def test_asymmetric_range_far_from_zero_is_not_clipped(weight: Tensor, largest_error: float) -> None:
    grid = rounded(weight.unsqueeze(0), QuantSpec(4, None, symmetric=False))
    error = float((grid.dequantize() - weight).abs().max())
    assert error <= largest_error
    assert error <= float(grid.scale)
    assert len(set(grid.codes.flatten().tolist())) > 3


@pytest.mark.parametrize("spec", SPECS, ids=QuantSpec.label)
def test_all_zero_group_has_scale_one_and_comes_back_exactly(spec: QuantSpec) -> None:
    weight = torch.zeros(3, 16)
    weight[1, :8] = 0.3
    grid = rounded(weight, spec)
    assert torch.equal(grid.dequantize()[[0, 2]], weight[[0, 2]])
    assert torch.equal(grid.scale[[0, 2]].float(), torch.ones_like(grid.scale[[0, 2]].float()))


@pytest.mark.parametrize("spec", SPECS, ids=QuantSpec.label)
def test_no_weight_is_further_than_one_scale_from_its_code(spec: QuantSpec) -> None:
    for magnitude in (1e-38, 1e-7, 3e-6, 1e-4, 0.02, 1.0, 300.0):
        for shift in (0.0, 1.0, -3.0):
            weight = (torch.randn(64, 16) + shift) * magnitude
            assert worst_error_in_scales(weight, spec) <= 1.0


@given(
    st.sampled_from(SPECS),
    st.lists(st.floats(-30, 30, width=32), min_size=16, max_size=16),
    st.floats(-26, 3),
)
def test_any_values_are_covered(spec: QuantSpec, values: list[float], exponent: float) -> None:
    weight = torch.tensor([values]) * 2.0**exponent
    assert worst_error_in_scales(weight, spec) <= 1.0 + 1e-5


@pytest.mark.parametrize("symmetric", [True, False])
def test_group_of_tiny_values_does_not_grow(symmetric: bool) -> None:
    weight = torch.cat([torch.randn(4, 8) * 1e-7, torch.randn(4, 8)], dim=1)
    grid = rounded(weight, QuantSpec(4, 8, symmetric))
    assert torch.isfinite(grid.dequantize()).all()
    assert float(grid.dequantize()[:, :8].abs().max()) <= 1.5 * float(weight[:, :8].abs().max())


def test_constant_group_comes_back_within_the_rounding_of_its_scale() -> None:
    weight = torch.full((2, 8), 0.7)
    weight[1] = -0.7
    grid = rounded(weight, QuantSpec(4, None, symmetric=False, scale_dtype="float16"))
    assert torch.equal(grid.codes, torch.tensor([[15], [0]], dtype=torch.uint8).expand(2, 8))
    assert torch.allclose(grid.dequantize(), weight, rtol=2**-11, atol=0)


def test_weights_too_large_for_any_storable_scale_are_refused() -> None:
    weight = torch.tensor([[1.0, 1e6]])
    with pytest.raises(NumericsError, match="1 groups span up to 2e\\+06"):
        minmax_grid(weight, QuantSpec(4, None, scale_dtype="float16"))
    assert float(minmax_grid(weight * 0.49, QuantSpec(4, None, scale_dtype="float16"))[0]) > 65000


def test_range_is_extended_to_include_zero() -> None:
    low, high = torch.tensor([[2.0, -3.0]]), torch.tensor([[3.0, -2.0]])
    scale, zero = grid_from_range(low, high, QuantSpec(4, 4, symmetric=False, scale_dtype="float16"))
    assert torch.equal(scale, torch.full((1, 2), 3 / 15).half())
    assert zero.tolist() == [[0, 15]]


def test_codes_round_half_to_even_and_clip_at_both_ends() -> None:
    weight = torch.tensor([[-9.0, -1.5, -0.5, 0.5, 1.5, 2.5, 7.0, 9.0]])
    spec = QuantSpec(4, None)
    codes = choose_codes(weight, torch.ones(1, 1).bfloat16(), torch.full((1, 1), 8, dtype=torch.uint8), spec)
    assert codes.tolist() == [[0, 6, 8, 8, 10, 10, 15, 15]]


@pytest.mark.parametrize("spec", SPECS, ids=QuantSpec.label)
def test_weights_on_a_grid_get_their_codes_back(spec: QuantSpec) -> None:
    grid = rounded(torch.randn(16, 64), QuantSpec(spec.bits, spec.group_size, spec.symmetric, spec.scale_dtype))
    assert torch.equal(choose_codes(grid.dequantize(), grid.scale, grid.zero, spec), grid.codes)


def test_groups_are_contiguous_columns() -> None:
    weight = torch.arange(1.0, 13.0).reshape(1, 12)
    scale, _ = minmax_grid(weight, QuantSpec(4, 4, scale_dtype="float16"))
    assert torch.equal(scale, (torch.tensor([[8.0, 16.0, 24.0]]) / 15).half())


def test_grid_of_a_half_precision_weight_is_that_of_its_float32_copy() -> None:
    weight = torch.randn(4, 16).bfloat16()
    for spec in SPECS:
        for mine, other in zip(minmax_grid(weight, spec), minmax_grid(weight.float(), spec), strict=True):
            assert torch.equal(mine, other)


# ------------------------------------------------------------------------------------------------ search


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.scale_dtype == "bfloat16"], ids=QuantSpec.label)
def test_the_searched_grid_is_the_best_candidate_of_every_group_by_brute_force(spec: QuantSpec) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(300, 32, generator=generator, dtype=torch.float64).pow(3)  # heavy tails: shrinking pays
    importance = torch.rand(32, generator=generator, dtype=torch.float64).pow(4)
    found = searched_grid(weight, spec, importance)
    size = spec.group_size or 32
    shrunk = 0
    for row in range(0, 300, 29):
        for group in range(32 // size):
            columns = slice(group * size, (group + 1) * size)
            part, weights = weight[row : row + 1, columns], importance[columns]
            errors = []
            for shrink in SHRINKS:
                low, high = part.min().reshape(1, 1) * shrink, part.max().reshape(1, 1) * shrink
                scale, zero = grid_from_range(low, high, spec)
                for turned in (scale, -scale) if spec.symmetric and spec.bits <= 4 else (scale,):
                    rebuilt = (choose_codes(part, turned, zero, spec).double() - zero.double()) * turned.double()
                    errors.append((float(((rebuilt - part) ** 2 * weights).sum()), float(turned), int(zero)))
            own = (float(found[0][row, group]), int(found[1][row, group]))
            least = min(error for error, _, _ in errors)
            assert own in [(scale, zero) for error, scale, zero in errors if error <= least * (1 + 1e-12)]
            shrunk += own != errors[0][1:]
    assert bool((found[0] < 0).any()) == (spec.symmetric and spec.bits <= 4)
    assert shrunk > 0 or spec.bits == 8  # a code of 255 is hardly an outlier


def test_without_importance_the_searched_grid_is_the_min_max_grid() -> None:
    weight = torch.randn(16, 32)
    for one, other in zip(
        searched_grid(weight, QuantSpec(4, 8), torch.zeros(32)), minmax_grid(weight, QuantSpec(4, 8)), strict=True
    ):
        assert torch.equal(one, other)


def test_weights_on_a_grid_keep_it_through_the_search() -> None:
    spec = QuantSpec(4, 8, symmetric=False)
    grid = rounded(torch.randn(16, 32), spec)
    scale, zero = searched_grid(grid.dequantize(), spec, torch.rand(32) + 0.1)
    again = QuantizedWeight(spec, choose_codes(grid.dequantize(), scale, zero, spec), scale, zero)
    assert torch.equal(again.dequantize(), grid.dequantize())
