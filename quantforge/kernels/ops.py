"""The operators ``torch.ops.quantforge.*``: importing this registers them, asks no device and loads no kernel.

    w4a16_linear, w8a16_linear   x times codes of 4 or 8 bits
    w8a8_linear                  the same with x rounded to INT8 per token: symmetric codes, one scale a row
    w4a8_linear                  4-bit codes, x rounded to INT8 for each group of inputs; on the CPU only
    transposed_weight            the weights themselves, [in, out]

Weights, scales and zeros are in the layout of x's device: `panels` on the CPU (or `int4pack`, uint8, where nothing was
compiled), `planar` (`rows` for w8a8) on a GPU.
Results have the dtype of x. The gradient for x and the bias goes through weights of 16 bits, not through rounded x.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantforge.kernels import gpu, int4pack, native, panels, reference
from quantforge.kernels.planar import group_inputs

LINEAR = (
    "(Tensor x, Tensor weight, Tensor scales, Tensor? zeros, Tensor? bias, int group_size, int out_features) -> Tensor"
)
TOKENS_FOR_MATMUL = 128
"""Tokens from which on bfloat16 goes through the processor's own matrix product, where it has one for bfloat16."""
MATMUL_ELEMENTS = 1 << 19
"""Weights that are dequantized at once for it."""

SCHEMAS = {
    "w4a16_linear": LINEAR,
    "w8a16_linear": LINEAR,
    "w4a8_linear": LINEAR,
    "w8a8_linear": "(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int out_features) -> Tensor",
    "transposed_weight": "(Tensor weight, Tensor scales, Tensor? zeros, int bits, int group_size, int out_features, "
    "int in_features, ScalarType dtype) -> Tensor",
}
_library: Any = torch.library.Library("quantforge", "DEF")  # type: ignore[no-untyped-call]
for _name, _schema in SCHEMAS.items():
    _library.define(f"{_name}{_schema}", tags=(torch.Tag.pt2_compliant_tag,))

# ---------------------------------------------------------------------------------------------------- CPU


def checked(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    bits: int, group_size: int, out_features: int,
) -> int:  # fmt: skip
    """The group size in whole words; ValueError for what would be read out of bounds."""
    in_features = x.shape[-1]
    group = group_inputs(group_size, in_features)
    rows, words = -(-out_features // panels.ROWS), -(-in_features * bits // 32)
    corners = (rows, -(-in_features // group), panels.ROWS)
    if weight.dtype != torch.int32 or tuple(weight.shape) != (rows, words, panels.ROWS):
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)}; {bits} bits, {out_features} out, {in_features} in make "
            f"int32 {[rows, words, panels.ROWS]}"
        )
    if tuple(scales.shape) != corners or scales.dtype not in native.TYPES:
        raise ValueError(f"scales are {scales.dtype} {list(scales.shape)}; expected floats {list(corners)}")
    if zeros is not None and (tuple(zeros.shape) != corners or zeros.dtype != torch.uint8):
        raise ValueError(f"zeros are {zeros.dtype} {list(zeros.shape)}; expected uint8 {list(corners)}")
    _check_float(x, bias, out_features)
    if not panels.fits(in_features, group, bits):
        raise ValueError(f"groups of {group} inputs do not end where words of {bits}-bit codes do")
    return -(-group * bits // 32) * 32 // bits


def _checked_int4pack(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    bits: int, group_size: int, out_features: int,
) -> int:  # fmt: skip
    """The group size; ValueError for what does not belong together."""
    in_features = x.shape[-1]
    if not int4pack.fits(in_features, group_size, bits):
        raise ValueError(
            f"weight is uint8, which holds 4 bits in whole groups of {int4pack.GROUPS}, not {bits} bits and "
            f"{in_features} inputs in groups of {group_size}"
        )
    padded = -(-out_features // int4pack.ROWS) * int4pack.ROWS
    corners = (in_features // group_size, padded)
    shapes = {"weight": (weight, (padded, in_features // 2)), "scales": (scales, corners), "zeros": (zeros, corners)}
    for name, (tensor, expected) in shapes.items():
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(f"{name} are {list(tensor.shape)}; expected {list(expected)}")
    _check_float(x, bias, out_features)
    return group_size


def _check_float(x: Tensor, bias: Tensor | None, out_features: int) -> None:
    if x.dtype not in native.TYPES:
        raise ValueError(f"x is {x.dtype}; expected float32, bfloat16 or float16")
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise ValueError(f"bias is {list(bias.shape)}; expected {[out_features]}")


def _cpu_linear(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    bits: int, group_size: int, out_features: int, integers: bool,
) -> Tensor:  # fmt: skip
    in_features = x.shape[-1] if x.dim() else 0
    if in_features == 0:
        raise ValueError(f"x is {list(x.shape)}; it has no inputs")
    stock = weight.dtype == torch.uint8
    check = _checked_int4pack if stock else checked
    group = check(x, weight, scales, zeros, bias, bits, group_size, out_features)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    flat = x.reshape(-1, in_features).contiguous()
    packed = (weight.contiguous(), scales.contiguous(), None if zeros is None else zeros.contiguous())
    library = native.status().library
    if stock and not integers:
        y = int4pack.linear(flat, *packed, bias, out_features=out_features)
    elif stock or library is None:
        y = _without_library(flat, *packed, bias, bits, group, out_features, integers)
    else:
        sizes = native.Sizes(bits, out_features, in_features, group)
        matrix = native.Matrix(*packed, bias, x.dtype, sizes, integers=integers)
        if (
            not integers
            and len(flat) >= TOKENS_FOR_MATMUL
            and x.dtype == torch.bfloat16
            and native.multiplies_bfloat16()
        ):
            y = _matmul(library, matrix, flat, bias)
        else:
            y = native.linear(library, matrix, flat)
    return y.view(*x.shape[:-1], out_features)


def _without_library(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    bits: int, group: int, out_features: int, integers: bool,
) -> Tensor:  # fmt: skip
    """The same in torch, dequantized each time: slow, and said so by `native.status`; either layout."""
    values = x.to(torch.float32)
    if integers and bits == 8:
        codes, step = reference.round_tokens(values)
        values = codes * step
    elif integers:
        values = reference.round_pieces(values, group)
    plain = _plain(weight, scales, zeros, bits, group, out_features, x.shape[1])
    return functional.linear(values, plain, None if bias is None else bias.to(torch.float32)).to(x.dtype)


def _plain(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, out_features: int, in_features: int
) -> Tensor:
    """Float32 [out, in], in torch alone."""
    if weight.dtype == torch.uint8:
        return int4pack.dequantize(weight, scales, zeros, out_features=out_features)
    sizes = {"bits": bits, "group_size": group, "out_features": out_features, "in_features": in_features}
    return panels.dequantize(weight, scales, zeros, **sizes)


def _matmul(library: Any, matrix: native.Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Many tokens of bfloat16: some columns of the weight after others, rounded to bfloat16, by torch's own product."""
    in_features, out_features = matrix.in_features, matrix.out_features
    y = x.new_empty(len(x), out_features)
    step = max(1, MATMUL_ELEMENTS // in_features // panels.ROWS) * panels.ROWS
    buffer = x.new_empty(min(step, out_features) * in_features)
    for column in range(0, out_features, step):
        width = min(step, out_features - column)
        some = buffer[: width * in_features].view(in_features, width)
        native.transpose_into(some, library, matrix, column=column)
        torch.matmul(x, some, out=y) if width == out_features else y[:, column : column + width].copy_(x @ some)
    return y if bias is None else y.add_(bias)


def _w4a16_cpu(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, group: int, out_features: int
) -> Tensor:
    return _cpu_linear(x, weight, scales, zeros, bias, 4, group, out_features, False)


def _w8a16_cpu(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, group: int, out_features: int
) -> Tensor:
    return _cpu_linear(x, weight, scales, zeros, bias, 8, group, out_features, False)


def _w4a8_cpu(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, group: int, out_features: int
) -> Tensor:
    return _cpu_linear(x, weight, scales, zeros, bias, 4, group, out_features, True)


def _w8a8_cpu(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return _cpu_linear(x, weight, scales, None, bias, 8, x.shape[-1], out_features, True)


def _transposed_cpu(
    weight: Tensor, scales: Tensor, zeros: Tensor | None,
    bits: int, group_size: int, out_features: int, in_features: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    shape = torch.empty(0, in_features, dtype=dtype)
    stock = weight.dtype == torch.uint8
    check = _checked_int4pack if stock else checked
    group = check(shape, weight, scales, zeros, None, bits, group_size, out_features)
    packed = (weight.contiguous(), scales.contiguous(), None if zeros is None else zeros.contiguous())
    library = native.status().library
    if stock or library is None:
        return _plain(*packed, bits, group, out_features, in_features).t().to(dtype).contiguous()
    y = torch.empty(in_features, out_features, dtype=dtype)
    matrix = native.Matrix(*packed, None, dtype, native.Sizes(bits, out_features, in_features, group))
    native.transpose_into(y, library, matrix, column=0)
    return y


# ---------------------------------------------------------------------------------------------------- GPU


def _w4a16_gpu(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, group: int, out_features: int
) -> Tensor:
    return gpu.planar_linear(x, weight, scales, zeros, bias, bits=4, group_size=group, out_features=out_features)


def _w8a16_gpu(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, group: int, out_features: int
) -> Tensor:
    return gpu.planar_linear(x, weight, scales, zeros, bias, bits=8, group_size=group, out_features=out_features)


def _w4a8_gpu(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, group: int, out_features: int
) -> Tensor:
    raise NotImplementedError("w4a8_linear runs on the CPU only; use w4a16_linear on a GPU")


def _transposed_gpu(
    weight: Tensor, scales: Tensor, zeros: Tensor | None,
    bits: int, group_size: int, out_features: int, in_features: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    sizes = {"bits": bits, "group_size": group_size, "out_features": out_features, "in_features": in_features}
    return gpu.dequantize(weight, scales, zeros, **sizes).t().to(dtype).contiguous()


# ---------------------------------------------------------------------------------------------------- shapes, gradients


def _fake(x: Tensor, weight: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    if weight.device.type == "meta" and x.device.type != "meta":
        raise ValueError(f"x is on {x.device}, and the weight is on meta, without numbers")
    return x.new_empty((*x.shape[:-1], rest[-1]))


def _fake_transposed(weight: Tensor, scales: Tensor, zeros: Tensor | None, *rest: Any) -> Tensor:
    _bits, _group_size, out_features, in_features, dtype = rest
    return weight.new_empty((in_features, out_features), dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, scales, zeros, _bias, group_size, out_features = inputs
    ctx.save_for_backward(weight, scales, zeros)
    ctx.sizes = (group_size, out_features, x.shape[-1])


def _backward(bits: int) -> Any:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scales, zeros = ctx.saved_tensors
        group_size, out_features, in_features = ctx.sizes
        grad_x = None
        if ctx.needs_input_grad[0]:
            transposed = torch.ops.quantforge.transposed_weight(
                weight, scales, zeros, bits, group_size, out_features, in_features, grad.dtype
            )
            grad_x = grad @ transposed.t()
        grad_bias = grad.reshape(-1, out_features).sum(0) if ctx.needs_input_grad[4] else None
        return grad_x, None, None, None, grad_bias, None, None

    return backward


def _no_gradient(ctx: Any, grad: Tensor) -> Any:
    raise NotImplementedError(
        "no gradient goes through activations that are rounded to 8 bits; load the model with float activations"
    )


def _register() -> None:
    cpu = {"w4a16_linear": _w4a16_cpu, "w8a16_linear": _w8a16_cpu, "w4a8_linear": _w4a8_cpu, "w8a8_linear": _w8a8_cpu}
    on_gpu = {
        "w4a16_linear": _w4a16_gpu,
        "w8a16_linear": _w8a16_gpu,
        "w4a8_linear": _w4a8_gpu,
        "w8a8_linear": gpu.int8_linear,
    }
    for name in cpu:
        _library.impl(name, cpu[name], "CPU")
        _library.impl(name, on_gpu[name], "CUDA")
        torch.library.register_fake(f"quantforge::{name}", _fake, lib=_library)
        if name.endswith("a16_linear"):
            backward = _backward(int(name[1]))
            torch.library.register_autograd(f"quantforge::{name}", backward, setup_context=_keep, lib=_library)
        else:
            torch.library.register_autograd(f"quantforge::{name}", _no_gradient, lib=_library)
    _library.impl("transposed_weight", _transposed_cpu, "CPU")
    _library.impl("transposed_weight", _transposed_gpu, "CUDA")
    torch.library.register_fake("quantforge::transposed_weight", _fake_transposed, lib=_library)


_register()
