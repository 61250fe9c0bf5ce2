"""Kernels of the CPU: equal to float64, at every bits, group, dtype and ragged size, whatever instructions are used."""

import itertools

import pytest
import torch
from torch import Tensor

from quantforge.kernels import native, ops, panels, planar, reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
TOKENS = (1, 2, 15, 16, 17, 64)
SHAPES = ((48, 128), (33, 200), (16, 72), (5, 24))


@pytest.fixture(params=list(native.LEVELS))
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each set of instructions that this processor has, in turn."""
    try:
        library = native.load(request.param)
    except (OSError, RuntimeError) as error:
        pytest.skip(f"{request.param} cannot be built here: {error}")
    if not library.supported():
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(native, "status", lambda: native.Status(request.param, "", library))
    return str(request.param)


def grid(
    out: int, inp: int, bits: int, group: int, scale: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(out * inp + bits)
    groups = -(-inp // group)
    codes = torch.randint(0, 1 << bits, (out, inp), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(out, groups, generator=draw) * 0.02 - 0.004).to(scale)
    return codes, scales, torch.randint(0, 1 << bits, (out, groups), dtype=torch.uint8, generator=draw)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers with NaN right before and behind them in memory."""
    count = torch.Size(shape).numel()
    memory = torch.full((count + 64,), float("nan"), dtype=dtype)
    memory[32:-32] = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    return memory[32:-32].view(shape)


def poison(scales: Tensor, weight: Tensor, out: int, inp: int, bits: int) -> tuple[Tensor, Tensor]:
    """Rows that pad a panel have scales of NaN, inputs that pad a word codes of ones."""
    scales, weight = scales.clone(), weight.clone()
    scales.transpose(1, 2).reshape(-1, scales.shape[1])  # [padded out, groups]
    if out % panels.ROWS:
        scales[-1, :, out % panels.ROWS :] = float("nan")
    for position, place in enumerate(panels.PLACES[bits]):
        if inp % (32 // bits) and place >= inp % (32 // bits):
            weight[:, -1] |= torch.tensor(((1 << bits) - 1) << (position * bits)).to(torch.int32)
    return scales, weight


def distance(found: Tensor, expected: Tensor, x: Tensor, weight: Tensor) -> float:
    """Largest difference in units of what the sums are made of."""
    unit = x.double().abs() @ weight.double().abs().t() + 1e-30
    return float(((found.double() - expected).abs() / unit).max())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_w4a16_and_w8a16_equal_float64(level: str, bits: int, dtype: torch.dtype) -> None:
    operator = {4: torch.ops.quantforge.w4a16_linear, 8: torch.ops.quantforge.w8a16_linear}[bits]
    kinds = itertools.cycle([torch.float16, torch.bfloat16, torch.float32])
    for (out, inp), group in itertools.product(SHAPES, (8, 32, 64, 128, -1)):
        width = planar.group_inputs(group, inp)
        codes, scales, zeros = grid(out, inp, bits, width, next(kinds))
        for symmetric, tokens in itertools.product((True, False), TOKENS):
            zero, bias = None if symmetric else zeros, poisoned((out,), dtype) if tokens % 2 else None
            packed = panels.pack(codes, scales, zero, bits=bits, group_size=group)
            x = poisoned((tokens, inp), dtype)
            expected = reference.linear(x, codes, scales, zero, bias, bits=bits, group_size=width)
            clean, weight = poison(packed[1], packed[0], out, inp, bits)
            y = operator(x, weight, clean, packed[2], bias, group, out)
            assert y.dtype == dtype and y.shape == (tokens, out)
            plain = reference.linear(torch.eye(inp), codes, scales, zero, None, bits=bits, group_size=width).t()
            spread = torch.full_like(plain, 128.0 if bits == 8 else 8.0) * scales.double().abs().max() + plain.abs()
            tolerance = ROUNDING[dtype] if dtype != torch.float32 else 3e-7
            assert distance(y, expected, x, spread) < tolerance, (out, inp, group, symmetric, tokens)
            assert float((y.double() - expected).norm() / expected.norm()) < ROUNDING[dtype]


def test_w8a8_is_exact_at_the_ends_of_its_range(level: str) -> None:
    """Codes and activations at their extremes, where 16-bit sums of unsigned and signed bytes saturate."""
    for out, inp, tokens in ((16, 512, 1), (33, 70000, 2), (40, 100, 17)):
        codes = torch.randint(0, 2, (out, inp), dtype=torch.uint8) * 255
        x = torch.randint(0, 2, (tokens, inp)).float() * 2 - 1
        scales = torch.rand(out, 1) + 0.5
        weight, scale, _ = panels.pack(codes, scales, None, bits=8, group_size=-1)
        y = torch.ops.quantforge.w8a8_linear(x, weight, scale, None, out)
        expected = reference.w8a8_linear(x, codes, scales, None)
        assert float((y.double() - expected).abs().max() / expected.abs().max()) < 3e-7


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_w8a8_rounds_each_token_as_the_reference_does(level: str, dtype: torch.dtype) -> None:
    for (out, inp), tokens in itertools.product(SHAPES, TOKENS):
        codes, scales, _ = grid(out, inp, 8, inp)
        weight, scale, _ = panels.pack(codes, scales, None, bits=8, group_size=-1)
        x, bias = poisoned((tokens, inp), dtype), poisoned((out,), dtype)
        y = torch.ops.quantforge.w8a8_linear(x, weight, scale, bias, out)
        expected = reference.w8a8_linear(x, codes, scales, bias)
        assert float((y.double() - expected).norm() / expected.norm()) < ROUNDING[dtype]


def test_w4a8_equals_activations_rounded_piece_by_piece(level: str) -> None:
    for (out, inp), group in itertools.product(((48, 640), (33, 200)), (32, 64, -1)):
        width = planar.group_inputs(group, inp)
        codes, scales, zeros = grid(out, inp, 4, width)
        packed = panels.pack(codes, scales, zeros, bits=4, group_size=group)
        for tokens in TOKENS:
            x = poisoned((tokens, inp), torch.float32)
            rounded = reference.round_pieces(x, width)
            expected = reference.linear(rounded, codes, scales, zeros, None, bits=4, group_size=width)
            y = torch.ops.quantforge.w4a8_linear(x, *packed, None, group, out)
            assert float((y.double() - expected).norm() / expected.norm()) < 2e-6
            exact = reference.linear(x, codes, scales, zeros, None, bits=4, group_size=width)
            assert 1e-4 < float((y.double() - exact).norm() / exact.norm()) < 2e-2


def test_zeros_and_numbers_that_are_none_come_through(level: str) -> None:
    codes, scales, zeros = grid(20, 64, 4, 32)
    packed = panels.pack(codes, scales, zeros, bits=4, group_size=32)
    x = torch.zeros(3, 64)
    x[1, 40] = float("nan")
    x[2, 3] = float("inf")
    y = torch.ops.quantforge.w4a16_linear(x, *packed, None, 32, 20)
    assert not y[0].any() and y[1].isnan().all() and not y[2].isfinite().any()
    assert not torch.ops.quantforge.w4a16_linear(x[:0], *packed, None, 32, 20).numel()
    tiny = torch.randn(2, 64)
    for size in (1e-30, 1e-37, 1e30):
        expected = reference.linear(tiny * size, codes, scales, zeros, None, bits=4, group_size=32)
        y = torch.ops.quantforge.w4a16_linear(tiny * size, *packed, None, 32, 20)
        assert float((y.double() - expected).norm()) < 2e-6 * float(expected.norm()) + 1e-36


def test_transposed_weight_is_the_weight(level: str) -> None:
    for bits, dtype in itertools.product((4, 8), DTYPES.values()):
        codes, scales, zeros = grid(37, 200, bits, 64)
        packed = panels.pack(codes, scales, zeros, bits=bits, group_size=64)
        plain = reference.dequantize(
            codes, scales, zeros, reference.contiguous_groups(200, 64), bits=bits, dtype=torch.float32
        )
        found = torch.ops.quantforge.transposed_weight(*packed, bits, 64, 37, 200, dtype)
        assert torch.equal(found, plain.t().to(dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_many_tokens_of_bfloat16_in_slices_are_the_same(level: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "TOKENS_FOR_MATMUL", 5)
    monkeypatch.setattr(ops, "MATMUL_ELEMENTS", 200 * 16)
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)
    codes, scales, zeros = grid(37, 200, bits, 64)
    packed = panels.pack(codes, scales, zeros, bits=bits, group_size=64)
    operator = getattr(torch.ops.quantforge, f"w{bits}a16_linear")
    x, bias = poisoned((2, 5, 200), torch.bfloat16), poisoned((37,), torch.bfloat16)
    expected = reference.linear(x, codes, scales, zeros, bias, bits=bits, group_size=64)
    y = operator(x, *packed, bias, 64, 37)
    assert y.shape == (2, 5, 37) and float((y.double() - expected).norm() / expected.norm()) < 6e-3


def test_threads_and_no_pool_of_threads_give_the_same_bits(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales, zeros = grid(640, 512, 4, 64)
    packed = panels.pack(codes, scales, zeros, bits=4, group_size=64)
    x = poisoned((3, 512), torch.float32)
    before = torch.get_num_threads()
    found = []
    try:
        for threads, pool in ((1, native._pool()), (2, native._pool()), (2, None)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(native, "_pool", lambda pool=pool: pool)
            found.append(torch.ops.quantforge.w4a16_linear(x, *packed, None, 64, 640))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_does_not_belong_together_is_refused(level: str) -> None:
    codes, scales, zeros = grid(32, 64, 4, 32)
    weight, scale, zero = panels.pack(codes, scales, zeros, bits=4, group_size=32)
    x = torch.randn(2, 64)
    wrong = {
        "weight is": (torch.randn(2, 72), weight, scale, zero, None, 32, 32),
        "scales are": (x, weight, scale[:, :1], zero, None, 32, 32),
        "zeros are": (x, weight, scale, zero.to(torch.int32), None, 32, 32),
        "x is": (x.double(), weight, scale, zero, None, 32, 32),
        "bias is": (x, weight, scale, zero, torch.zeros(31), 32, 32),
    }
    for said, arguments in wrong.items():
        with pytest.raises(ValueError, match=said):
            torch.ops.quantforge.w4a16_linear(*arguments)


@pytest.mark.parametrize("bits", [4, 8])
def test_without_a_compiler_results_are_the_same(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "status", lambda: native.Status(None, "a test"))
    codes, scales, zeros = grid(33, 200, bits, 64)
    packed = panels.pack(codes, scales, zeros, bits=bits, group_size=64)
    x = poisoned((5, 200), torch.float32)
    operator = getattr(torch.ops.quantforge, f"w{bits}a16_linear")
    expected = reference.linear(x, codes, scales, zeros, None, bits=bits, group_size=64)
    assert float((operator(x, *packed, None, 64, 33).double() - expected).norm() / expected.norm()) < 1e-6


def test_a_machine_without_a_compiler_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    monkeypatch.delenv(native.SWITCH, raising=False)
    native.load.cache_clear()
    native.status.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no compiled CPU kernel.*install a C compiler") as caught:
            assert native.status().level is None and native.status().level is None
        assert len(caught) == 1
    finally:
        native.load.cache_clear()
        native.status.cache_clear()


def test_integers_of_subnormal_inputs_do_not_wrap(level: str) -> None:
    """The step is then a few units of the smallest number, so that a quotient can be beyond what 8 bits hold."""
    smallest = 2.0**-149
    codes = torch.full((16, 64), 9, dtype=torch.uint8)
    packed = panels.pack(codes, torch.full((16, 1), 128.0), None, bits=4, group_size=64)
    for count in (178, 190, -178, -190):
        x = torch.full((1, 64), count * smallest)
        y = torch.ops.quantforge.w4a8_linear(x, *packed, None, 64, 16)
        assert torch.all(y.sign() == (1 if count > 0 else -1)), (count, y)


@pytest.mark.parametrize("bits", [4, 8])
def test_panels_unpack_to_what_was_packed(bits: int) -> None:
    for (out, inp), group in itertools.product(SHAPES, (8, 64, -1)):
        codes, scales, zeros = grid(out, inp, bits, planar.group_inputs(group, inp))
        packed = panels.pack(codes, scales, zeros, bits=bits, group_size=group)
        found = panels.unpack(*packed, bits=bits, group_size=group, out_features=out, in_features=inp)
        assert all(torch.equal(a, b) for a, b in zip(found, (codes, scales, zeros), strict=True))
    with pytest.raises(ValueError, match="groups of 14"):
        panels.pack(codes, scales, zeros, bits=bits, group_size=14)
    with pytest.raises(ValueError, match="codes reach 255"):
        panels.pack(torch.full((4, 8), 255, dtype=torch.uint8), scales[:4, :1], None, bits=4, group_size=-1)


@pytest.mark.parametrize("name", ["w4a16_linear", "w8a16_linear", "w4a8_linear", "w8a8_linear"])
@pytest.mark.parametrize("bias", [False, True])
def test_operators_are_sound_to_torch(name: str, bias: bool) -> None:
    bits = int(name[1])
    codes, scales, zeros = grid(24, 64, bits, 64)
    weight, scale, zero = panels.pack(codes, scales, zeros, bits=bits, group_size=64)
    for dtype, grad in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        if grad and not name.endswith("a16_linear"):
            continue
        x = torch.randn(3, 2, 64, dtype=dtype, requires_grad=grad)
        offset = torch.randn(24, dtype=dtype) if bias else None
        rest = (offset, 24) if name == "w8a8_linear" else (zero, offset, 64, 24)
        torch.library.opcheck(getattr(torch.ops.quantforge, name).default, (x, weight, scale, *rest))


def test_the_gradient_is_that_of_the_dequantized_layer() -> None:
    codes, scales, zeros = grid(24, 64, 4, 32)
    packed = panels.pack(codes, scales, zeros, bits=4, group_size=32)
    x, bias = torch.randn(5, 64, requires_grad=True), torch.randn(24, requires_grad=True)
    torch.ops.quantforge.w4a16_linear(x, *packed, bias, 32, 24).square().sum().backward()
    plain = reference.dequantize(codes, scales, zeros, reference.contiguous_groups(64, 32), bits=4, dtype=torch.float32)
    y, other = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    torch.nn.functional.linear(y, plain, other).square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-5, atol=1e-6) and torch.allclose(bias.grad, other.grad, rtol=1e-5)
    weight, scale, _ = panels.pack(codes, scales[:, :1], None, bits=8, group_size=-1)
    with pytest.raises(NotImplementedError, match="float activations"):
        torch.ops.quantforge.w8a8_linear(x, weight, scale, None, 24).sum().backward()


def test_compile_and_export_with_any_number_of_tokens() -> None:
    codes, scales, zeros = grid(24, 64, 4, 32)
    packed = panels.pack(codes, scales, zeros, bits=4, group_size=32)

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.quantforge.w4a16_linear(x, *packed, None, 32, 24) * 2

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    tokens = torch.export.Dim("tokens", min=1, max=128)
    exported = torch.export.export(layer, (torch.randn(7, 64),), dynamic_shapes=({0: tokens},)).module()
    for count in (1, 7, 33):
        x = torch.randn(count, 64)
        assert torch.equal(compiled(x), layer(x)) and torch.equal(exported(x), layer(x))


def test_shapes_are_known_without_values() -> None:
    meta = torch.empty(3, 64, device="meta", dtype=torch.bfloat16)
    y = torch.ops.quantforge.w4a16_linear(meta, meta, meta, None, None, 32, 24)
    assert y.device.type == "meta" and y.shape == (3, 24) and y.dtype == torch.bfloat16
    assert ops.TOKENS_FOR_MATMUL > 4
