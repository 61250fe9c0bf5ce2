"""Which way a product goes on a GPU, decided here without one: kernels where they can, else dequantized, said once."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import quantforge
from quantforge.errors import UsageError
from quantforge.kernels import gpu, launch, ops, planar, reference, rows
from quantforge.kernels.linear import Grid, PackedLinear

CUDA = torch.device("cuda", 0)
SLOW = "dequantized at every call, which is slow: "


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing remembered of what earlier tests asked or said."""
    caches = (gpu.no_kernel, gpu._say, launch.target_of)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def refused(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    monkeypatch.setattr(gpu, "no_kernel", lambda device: reason)


def problem(bits: int, scale: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.randint(0, 1 << bits, (33, 96), dtype=torch.uint8)
    return codes, (torch.rand(33, 3) * 0.02).to(scale), torch.randint(0, 1 << bits, (33, 3), dtype=torch.uint8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("x_dtype", "scale_dtype", "reason", "said"),
    [
        (torch.float32, torch.float16, None, "x is torch.float32; the kernels take float16 and bfloat16"),
        (torch.bfloat16, torch.float32, None, "scales are torch.float32; the kernels"),
        (torch.float16, torch.bfloat16, "an sm_75", "an sm_75"),
        (torch.float32, torch.float32, "an sm_75", "x is torch.float32, scales are torch.float32"),
    ],
)
def test_what_no_kernel_takes_is_dequantized_and_said_once(
    bits: int,
    x_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    reason: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused(monkeypatch, reason)
    monkeypatch.setattr(launch, "planar_linear", None)
    codes, scales, zeros = problem(bits, scale_dtype)
    x, bias = torch.randn(2, 5, 96).to(x_dtype), torch.randn(33)
    on_gpu = {4: ops._w4a16_gpu, 8: ops._w8a16_gpu}[bits]
    for zero in (zeros, None):
        packed = planar.pack(codes, scales, zero, bits=bits, group_size=32)
        expected = reference.linear(x, codes, scales, zero, bias, bits=bits, group_size=32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = on_gpu(x, *packed, bias, 32, 33)
            on_gpu(x, *packed, bias, 32, 33)
        assert y.dtype == x_dtype and y.shape == (2, 5, 33)
        assert float((y.double() - expected).norm() / expected.norm()) < (1e-6 if x_dtype == torch.float32 else 6e-3)
        assert [SLOW + said in str(one.message) for one in caught] == ([True] if zero is zeros else [])


def test_what_kernels_take_goes_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(monkeypatch, None)
    seen: list[Any] = []

    def launched(*arguments: Any, **settings: Any) -> Tensor:
        seen.append((arguments, settings))
        return arguments[0]

    monkeypatch.setattr(launch, "planar_linear", launched)
    monkeypatch.setattr(launch, "int8_linear", launched)
    x, half, none = torch.randn(1, 64, dtype=torch.bfloat16), torch.ones(1, dtype=torch.float16), None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops._w4a16_gpu(x, x, half, none, none, 32, 7)
        ops._w8a16_gpu(x, x, half, none, none, 32, 7)
        gpu.int8_linear(x.float(), x, half.float(), none, 9)  # float32 is no matter there
    assert [settings for _, settings in seen] == [
        {"bits": 4, "group_size": 32, "out_features": 7},
        {"bits": 8, "group_size": 32, "out_features": 7},
        {"out_features": 9},
    ]
    assert [len(arguments) for arguments, _ in seen] == [5, 5, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_without_a_kernel_rounds_tokens_alike(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(monkeypatch, "an sm_75")
    codes, scales, x = torch.randint(0, 256, (33, 96)).byte(), torch.rand(33, 1), torch.randn(2, 3, 96)
    for bias in (None, torch.randn(33)):
        expected = reference.w8a8_linear(x.to(dtype), codes, scales, bias)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = gpu.int8_linear(x.to(dtype), *rows.pack(codes, scales), bias, 33)
        assert y.dtype == dtype and y.shape == (2, 3, 33)
        assert float((y.double() - expected).norm() / expected.norm()) < (1e-6 if dtype == torch.float32 else 4e-3)
        assert [SLOW in str(one.message) for one in caught] == ([] if bias is not None else [True])


@pytest.mark.parametrize(
    ("capability", "architecture", "expected"),
    [
        ((9, 0), None, "sm_90"),
        ((8, 6), None, "sm_86"),
        ((7, 5), None, "no kernel runs on cuda:0, an sm_75; they need sm_80 or newer"),
        ((9, 4), "gfx942:sramecc+:xnack-", "gfx942"),
        ((11, 0), "gfx1100", "no kernel runs on cuda:0, a gfx1100; they need one of gfx90a, gfx942, gfx950"),
    ],
)
def test_old_gpus_and_gfx11_have_no_kernel(
    capability: tuple[int, int], architecture: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", architecture and "7.0")
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    if expected.startswith("no kernel"):
        assert gpu.no_kernel(CUDA) == expected
        with pytest.raises(ValueError, match="no kernel runs on cuda:0"):
            launch.target_of(CUDA)
    else:
        assert gpu.no_kernel(CUDA) is None and launch.target_of(CUDA) == expected


def test_a_gpu_without_triton_dequantizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gpu.no_kernel(CUDA) == "triton is not installed (pip install triton)"


def test_transposed_weights_are_those_of_the_cpu() -> None:
    for bits, group in ((4, 32), (8, -1)):
        codes, scales, zeros = problem(bits, torch.float32)
        scales, zeros = (scales, zeros) if group == 32 else (scales[:, :1], zeros[:, :1])
        packed = planar.pack(codes, scales, zeros, bits=bits, group_size=group)
        index = reference.contiguous_groups(96, 32 if group == 32 else 96)
        plain = reference.dequantize(codes, scales, zeros, index, bits=bits, dtype=torch.float32)
        found = ops._transposed_gpu(*packed, bits, group, 33, 96, torch.bfloat16)
        assert torch.equal(found, plain.t().to(torch.bfloat16)) and found.is_contiguous()


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "activations", "layout"),
    [
        (4, 32, False, "float", "planar"),
        (4, 24, False, "float", "plain"),  # no plane divides it, though the CPU's words do
        (3, 96, True, "float", "planar"),
        (8, 96, True, "int8-token", "rows"),
        (8, 96, False, "int8-token", "planar"),
        (8, 96, True, "float", "planar"),
    ],
)
def test_the_layout_for_a_gpu(bits: int, group: int, symmetric: bool, activations: Any, layout: str) -> None:
    grid = random_grid(bits, group, symmetric)
    layer = PackedLinear(96, 33, bits=bits, activations=activations)
    layer.fill(grid)
    assert layer._layout_for(CUDA, layer.zeros) == layout


def random_grid(bits: int, group: int, symmetric: bool) -> Grid:
    groups = 96 // group
    zeros = torch.randint(0, 1 << bits, (33, groups), dtype=torch.uint8)
    codes = torch.randint(0, 1 << bits, (33, 96), dtype=torch.uint8)
    middle = torch.full_like(zeros, 1 << (bits - 1))
    scales = (torch.rand(33, groups) * 0.02 + 0.001).half()
    return Grid(codes, scales, middle if symmetric else zeros, torch.arange(96) // group)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a GPU that no kernel runs on: its layouts, its operators."""
    refused(monkeypatch, "a test")
    chosen: Callable[..., str] = PackedLinear._layout_for
    monkeypatch.setattr(PackedLinear, "_layout_for", lambda self, device, zeros: chosen(self, CUDA, zeros))
    for name, function in (("w4a16", ops._w4a16_gpu), ("w8a16", ops._w8a16_gpu), ("w8a8", gpu.int8_linear)):
        monkeypatch.setattr(torch.ops.quantforge, f"{name}_linear", function)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("activations", ["float", "int8-token"])
@pytest.mark.filterwarnings("ignore:quantforge. packed layers are dequantized")
def test_a_layer_in_the_layout_of_a_gpu_multiplies_right_and_comes_back(
    bits: int, activations: Any, as_on_a_gpu: None
) -> None:
    x = torch.randn(4, 96)
    rounded, step = reference.round_tokens(x)
    for group, symmetric in ((96, True), (32, False), (24, False)):
        grid = random_grid(bits, group, symmetric)
        layer = PackedLinear(96, 33, bits=bits, activations=activations, bias=True)
        torch.nn.init.normal_(layer.bias)
        layer.fill(grid)
        assert layer.layout != "panels" and all(torch.equal(a, b) for a, b in zip(layer.grid(), grid, strict=True))
        plain = reference.dequantize(*grid, bits=bits, dtype=torch.float64)
        inputs = (rounded * step if activations == "int8-token" else x).double()
        expected = inputs @ plain.t() + layer.bias.double()
        assert float((layer(x).double() - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("name", ["gptq-asym", "w8a8"])
@pytest.mark.filterwarnings("ignore:quantforge. packed layers are dequantized")
def test_a_model_generates_where_no_kernel_runs(
    name: str, tiny_exports: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    texts, layouts = [], []
    for _ in range(2):
        model = quantforge.load(tiny_exports[name], dtype="float32", device="cpu")
        layouts.append({m.layout for m in model.modules() if isinstance(m, PackedLinear)})
        texts.append(model.generate(torch.arange(1, 13)[None], max_new_tokens=6, do_sample=False, eos_token_id=None))
        request.getfixturevalue("as_on_a_gpu")  # from the second round on
    assert layouts == [{"panels"}, {"rows" if name == "w8a8" else "planar"}]
    assert torch.equal(*texts)


def test_rounding_each_group_is_refused_for_a_gpu_before_anything_is_read(
    tiny_exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"int8-group.*on the CPU only.*device='cpu'"):
        quantforge.load(tiny_exports["gptq"], device="cuda", activations="int8-group")
    layer = PackedLinear(96, 33, bits=4, activations="int8-group")
    with pytest.raises(ValueError, match="int8-group rounds inputs on the CPU only, not on cuda"):
        layer.fill(random_grid(4, 32, True), CUDA)
