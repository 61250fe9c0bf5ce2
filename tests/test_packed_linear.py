"""`PackedLinear` computes what its grid says, gives it back to the last bit, and keeps it through moves and casts."""

import copy

import pytest
import torch
from torch import Tensor

from quantforge.kernels import panels, reference
from quantforge.kernels.linear import Grid, PackedLinear


def random_grid(out: int, inp: int, bits: int, group: int, *, symmetric: bool = False, shuffled: bool = False) -> Grid:
    groups = -(-inp // group)
    index = torch.arange(inp) // group
    zeros = torch.randint(0, 1 << bits, (out, groups), dtype=torch.uint8)
    return Grid(
        torch.randint(0, 1 << bits, (out, inp), dtype=torch.uint8),
        (torch.rand(out, groups) * 0.02 + 0.001).half(),
        torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros,
        index[torch.randperm(inp)] if shuffled else index,
    )


def plain(grid: Grid, bits: int) -> Tensor:
    return reference.dequantize(*grid, bits=bits, dtype=torch.float64)


def filled(grid: Grid, bits: int, **settings: object) -> PackedLinear:
    layer = PackedLinear(grid.codes.shape[1], grid.codes.shape[0], bits=bits, **settings)  # type: ignore[arg-type]
    layer.fill(grid)
    return layer


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_any_bits_and_order_multiply_right_and_come_back(bits: int, shuffled: bool, symmetric: bool) -> None:
    grid = random_grid(40, 160, bits, 64, symmetric=symmetric, shuffled=shuffled)  # the last group is short
    layer = filled(grid, bits)
    x = torch.randn(2, 3, 160)
    expected = x.double() @ plain(grid, bits).t()
    assert layer.layout == "panels"
    assert float((layer(x).double() - expected).norm() / expected.norm()) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(layer.grid(), grid, strict=True))
    assert torch.equal(layer.dequantize().double(), plain(grid, bits).float().double())
    assert (layer.zeros is None) == (symmetric and bits in (4, 8))


def test_memory_is_that_of_the_codes() -> None:
    layer = filled(random_grid(256, 512, 4, 64, symmetric=True), 4)
    assert layer.packed_bytes == 256 * 512 // 2 + 256 * 8 * 2
    assert "in_features=512, out_features=256, bias=False, 4 bits group 64, panels, 69632 bytes" in repr(layer)
    assert filled(random_grid(256, 512, 4, 64), 4).packed_bytes == 256 * 512 // 2 + 256 * 8 * 3


def test_a_group_that_ends_inside_a_word_is_dequantized_and_says_so() -> None:
    grid = random_grid(24, 60, 4, 12)
    layer = filled(grid, 4)
    x = torch.randn(5, 60)
    assert layer.layout == "plain" and "plain" in repr(layer)
    assert torch.allclose(layer(x).double(), x.double() @ plain(grid, 4).t(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts_keep_scales_and_cast_the_bias(dtype: torch.dtype) -> None:
    grid = random_grid(32, 64, 4, 32)
    layer = filled(grid, 4, bias=True)
    torch.nn.init.normal_(layer.bias)
    moved = copy.deepcopy(layer).to(dtype)
    assert moved.bias.dtype == dtype and moved.scales.dtype == torch.float16
    assert all(torch.equal(a, b) for a, b in zip(moved.grid(), grid, strict=True))
    x = torch.randn(3, 64).to(dtype)
    expected = x.double() @ plain(grid, 4).t() + moved.bias.double()
    assert moved(x).dtype == dtype
    assert float((moved(x).double() - expected).norm() / expected.norm()) < {torch.float32: 1e-6}.get(dtype, 4e-3)


def test_w8a8_rounds_tokens_and_other_grids_do_so_too() -> None:
    x = torch.randn(4, 96)
    for bits, group, symmetric in ((8, 96, True), (8, 32, False), (4, 32, True)):
        grid = random_grid(24, 96, bits, group, symmetric=symmetric)
        layer = filled(grid, bits, activations="int8-token")
        codes, step = reference.round_tokens(x)
        expected = (codes * step).double() @ plain(grid, bits).t()
        assert float((layer(x).double() - expected).norm() / expected.norm()) < 1e-6


def test_rows_that_an_int32_cannot_sum_take_another_operator() -> None:
    grid = random_grid(3, 1 << 17, 8, 1 << 17, symmetric=True)
    layer = filled(grid, 8, activations="int8-token")
    x = torch.randn(2, 1 << 17)
    codes, step = reference.round_tokens(x)
    expected = (codes * step).double() @ plain(grid, 8).t()
    assert float((layer(x).double() - expected).norm() / expected.norm()) < 1e-6
    whole = filled(random_grid(3, 96, 8, 96, symmetric=True), 8, activations="int8-token")
    layouts = [found._layout_for(torch.device("cuda"), None) for found in (layer, whole)]  # asks no GPU
    assert layouts == ["planar", "rows"]


def test_rounding_each_group_is_an_option() -> None:
    grid = random_grid(24, 96, 4, 32)
    layer = filled(grid, 4, activations="int8-group")
    x = torch.randn(4, 96)
    expected = reference.round_pieces(x, 32).double() @ plain(grid, 4).t()
    assert float((layer(x).double() - expected).norm() / expected.norm()) < 1e-6


def test_a_state_dict_restores_a_filled_layer() -> None:
    first, second = (filled(random_grid(32, 64, 4, 32, shuffled=True), 4) for _ in range(2))
    x = torch.randn(3, 64)
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))
    assert set(first.state_dict()) == {"weight", "scales", "zeros", "input_order"}


def test_compiled_whole_and_with_any_number_of_tokens() -> None:
    layer = filled(random_grid(32, 64, 4, 32, shuffled=True), 4, bias=True)
    torch.nn.init.normal_(layer.bias)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (1, 7, 33):
        x = torch.randn(tokens, 64)
        assert torch.equal(compiled(x), layer(x))


def test_what_cannot_be_filled_is_refused() -> None:
    grid = random_grid(32, 64, 4, 32)
    with pytest.raises(ValueError, match=r"codes are \[32, 64\].*this layer is \[32, 128\]"):
        PackedLinear(128, 32, bits=4).fill(grid)
    uneven = grid._replace(group_index=torch.tensor([0] * 20 + [1] * 44))
    with pytest.raises(ValueError, match=r"groups have \[20, 44\] inputs"):
        PackedLinear(64, 32, bits=4).fill(uneven)
    with pytest.raises(ValueError, match="empty"):
        PackedLinear(64, 32, bits=4)(torch.randn(1, 64))
    assert not panels.fits(64, 12, 4)
