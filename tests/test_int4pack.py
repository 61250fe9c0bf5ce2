"""Packed layers where nothing could be compiled: torch's own int4pack, as exact as the dtype of the activations."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from quantforge.kernels import int4pack, native, reference
from quantforge.kernels.linear import Grid, PackedLinear

ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
OPERATOR = torch.ops.quantforge.w4a16_linear


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "status", lambda: native.Status(None, "a test"))


def grid(out: int, inp: int, group: int, scale: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.randint(0, 16, (out, inp), dtype=torch.uint8)
    scales = (torch.rand(out, inp // group) * 0.02 - 0.004).to(scale)
    return codes, scales, torch.randint(0, 16, scales.shape, dtype=torch.uint8)


def filled(codes: Tensor, scales: Tensor, zeros: Tensor, **settings: object) -> PackedLinear:
    out, inp = codes.shape
    layer = PackedLinear(inp, out, bits=4, **settings)  # type: ignore[arg-type]
    layer.fill(Grid(codes, scales, zeros, torch.arange(inp) // (inp // scales.shape[1])))
    return layer


@pytest.mark.parametrize("dtype", ROUNDING)
def test_products_equal_float64(dtype: torch.dtype) -> None:
    kinds = itertools.cycle([torch.float16, torch.bfloat16, torch.float32])
    for (out, inp), group, symmetric in itertools.product(((64, 128), (100, 384)), (32, 64, 128), (True, False)):
        codes, scales, zeros = grid(out, inp, group, next(kinds))
        zero = None if symmetric else zeros
        packed = int4pack.pack(codes, scales, zero)
        for tokens in (1, 2, 15, 16, 17, 64):
            bias = torch.randn(out).to(dtype) if tokens % 2 else None
            x = torch.randn(tokens, inp).to(dtype)
            y = OPERATOR(x, *packed, bias, group, out)
            expected = reference.linear(x, codes, scales, zero, bias, bits=4, group_size=group)
            assert y.dtype == dtype and y.shape == (tokens, out)
            assert float((y.double() - expected).norm() / expected.norm()) < ROUNDING[dtype], (out, group, tokens)


ELSEWHERE = """
import torch
from quantforge.kernels import int4pack, reference
torch.manual_seed(0)
codes, zeros = (torch.randint(0, 16, (100, n), dtype=torch.uint8) for n in (128, 4))
scales, x = torch.rand(100, 4), torch.randn(2, 128)
packed = int4pack.pack(codes, scales, zeros)
assert all(map(torch.equal, int4pack.unpack(*packed, out_features=100), (codes, scales, zeros)))
y = int4pack.linear(x, *packed, None, out_features=100)
expected = reference.linear(x, codes, scales, zeros, None, bits=4, group_size=32)
assert (y - expected).norm() / expected.norm() < 3e-6
y = int4pack.linear(x.bfloat16(), *packed, None, out_features=100)
assert (y - expected).norm() / expected.norm() < 8e-3
print(torch.backends.cpu.get_cpu_capability(), len(int4pack._order()))
"""


@pytest.mark.parametrize(("capability", "said"), [("avx2", "AVX2 32"), ("default", "DEFAULT 32")])
def test_the_order_of_other_processors_is_found(capability: str, said: str) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("only an x86 processor with AVX2 can pass for another")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, env=environment)
    assert ran.stdout.strip() == said, ran.stderr


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_layer_takes_it_and_gives_its_grid_back(symmetric: bool) -> None:
    codes, scales, zeros = grid(100, 128, 32)
    layer = filled(codes, scales, torch.full_like(zeros, 8) if symmetric else zeros, bias=True)
    assert layer.bias is not None
    torch.nn.init.normal_(layer.bias)
    assert layer.layout == "int4pack" and "int4pack" in repr(layer) and (layer.zeros is None) == symmetric
    found = layer.grid()
    assert torch.equal(found.codes, codes) and torch.equal(found.scales, scales)
    assert torch.equal(found.zeros, torch.full_like(zeros, 8) if symmetric else zeros)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (1, 9):
        x = torch.randn(tokens, 128)
        expected = torch.nn.functional.linear(x, layer.dequantize(), layer.bias)
        assert torch.allclose(layer(x), expected, atol=1e-5) and torch.equal(compiled(x), layer(x))


def test_what_aten_has_no_place_for_stays_in_panels() -> None:
    assert filled(*grid(32, 128, 16)).layout == "panels"  # groups of 16
    assert filled(*grid(32, 128, 128)).layout == "int4pack"
    assert not int4pack.fits(200, 64, 4) and not int4pack.fits(128, 64, 8) and int4pack.available()


def test_rounded_inputs_and_gradients_are_those_of_the_other_layout() -> None:
    codes, scales, zeros = grid(40, 128, 32)
    layer = filled(codes, scales, zeros, activations="int8-group")
    x = torch.randn(3, 128)
    expected = reference.linear(reference.round_pieces(x, 32), codes, scales, zeros, None, bits=4, group_size=32)
    assert layer.layout == "int4pack" and float((layer(x) - expected).norm() / expected.norm()) < 1e-6
    x.requires_grad_()
    packed = int4pack.pack(codes, scales, zeros)
    OPERATOR(x, *packed, None, 32, 40).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, layer.dequantize().sum(0).expand(3, -1), atol=1e-5)


def test_sound_to_torch_and_refusing_what_does_not_belong_together() -> None:
    codes, scales, zeros = grid(40, 128, 32)
    weight, scale, zero = int4pack.pack(codes, scales, zeros)
    x = torch.randn(2, 128)
    torch.library.opcheck(OPERATOR.default, (x, weight, scale, zero, None, 32, 40))
    wrong = {
        r"weight are \[64, 64\]; expected \[128, 64\]": (x, weight, scale, zero, None, 32, 65),
        r"scales are \[4, 40\]": (x, weight, scale[:, :40], zero, None, 32, 40),
        "groups of 48": (x, weight, scale, zero, None, 48, 40),
        "x is": (x.double(), weight, scale, zero, None, 32, 40),
    }
    for said, arguments in wrong.items():
        with pytest.raises(ValueError, match=said):
            OPERATOR(*arguments)
