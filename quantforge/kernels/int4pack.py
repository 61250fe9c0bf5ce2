"""torch's own layout of 4-bit weights on the CPU (aten int4pack), for machines where `native` has no kernel.

    weight  uint8 [padded out, in / 2]  as ``_convert_weight_to_int4pack_for_cpu`` makes it, by processor
    scales  [groups, padded out]        in the dtype that the checkpoint has
    zeros   uint8 [groups, padded out]  or none: the middle code

Out features are padded to a multiple of 64 with codes, scales and zeros of 0. In blocks of 64 or 32 rows, an input's
codes lie side by side, two in a byte; which row is where in a block is asked of torch itself (`_order`).

aten takes scales and zeros in the dtype of the activations. In float32 ``(code - 8) * scale + (8 - zero) * scale`` is
the weight exactly; in bfloat16 both terms are rounded, as a dense bfloat16 model has its weights rounded.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear
from torch.nn.functional import pad

from quantforge.kernels import reference

GROUPS = (32, 64, 128, 256)
"""The group sizes that aten takes."""

ROWS = 64
TOKENS = 4
"""Tokens up to which aten's scalar kernel (float32, or no AVX2) beats dequantizing the matrix: 35 ms against 235 for
one token of 4096 x 4096, 533 against 231 for 16."""


def fits(in_features: int, group_size: int, bits: int) -> bool:
    """Whether aten reads such a matrix: 4 bits, whole groups of one of its sizes."""
    return bits == 4 and group_size in GROUPS and in_features % group_size == 0


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """uint8 codes [out, in] below 16, scales and zeros [out, groups] -> weight, scales, zeros of this layout."""
    missing = -len(codes) % ROWS
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(pad(codes, (0, 0, 0, missing)).to(torch.int32), 1)

    def by_group(values: Tensor) -> Tensor:
        return pad(values, (0, 0, 0, missing)).t().contiguous()

    return weight, by_group(scales), None if zeros is None else by_group(zeros)


def unpack(
    weight: Tensor, scales: Tensor, zeros: Tensor | None, *, out_features: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The codes, scales and zeros that were packed, to the last bit."""
    order = _order()
    size, in_features = len(order), weight.shape[1] * 2
    blocks = weight.view(-1, in_features, size // 2)
    codes = torch.cat([blocks & 15, blocks >> 4], dim=-1)[..., torch.argsort(order)]  # [blocks, in, rows]
    codes = codes.transpose(1, 2).reshape(-1, in_features)[:out_features].contiguous()

    def by_row(values: Tensor) -> Tensor:
        return values[:, :out_features].t().contiguous()

    return codes, by_row(scales), None if zeros is None else by_row(zeros)


@cache
def _order() -> Tensor:
    """int64 [64 or 32]: the row of each half byte of a block, lower halves first; as this processor's kernel has it."""
    inputs = GROUPS[0]
    rows = torch.arange(ROWS, dtype=torch.int32)[:, None].expand(ROWS, inputs).contiguous()
    digits = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(part, 1) for part in (rows % 16, rows // 16)]
    for size in (64, 32):
        low, high = (digit.view(-1, inputs, size // 2)[0, 0].to(torch.int64) for digit in digits)
        order = torch.cat([low & 15, low >> 4]) + 16 * torch.cat([high & 15, high >> 4])
        if torch.equal(order.sort().values, torch.arange(size)):
            return order
    raise RuntimeError(f"torch {torch.__version__} packs 4-bit weights in an order that is not known here")


@cache
def available() -> bool:
    """Whether this torch has the operators, in a layout that can be read back."""
    names = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")
    if not all(hasattr(torch.ops.aten, name) for name in names):
        return False
    try:
        return len(_order()) > 0
    except RuntimeError:  # the operator is there, but not in this build, or its layout is new
        return False


def linear(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, *, out_features: int
) -> Tensor:
    """``x @ w.T + bias`` [tokens, out] in the dtype of contiguous x [tokens, in].

    bfloat16 goes to aten's vector kernel; other activations to the scalar one in float32, or, from some tokens on, to a
    product with the dequantized matrix.
    """
    vector = x.dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not vector and len(x) > TOKENS:
        plain = dequantize(weight, scales, zeros, out_features=out_features)
        y = dense_linear(x.to(torch.float32), plain)
    else:
        dtype = torch.bfloat16 if vector else torch.float32
        scale = scales.to(torch.float32)
        offset = torch.zeros_like(scale) if zeros is None else (8 - zeros.to(torch.float32)) * scale
        corners = torch.stack([scale, offset], dim=-1).to(dtype)
        group = x.shape[1] // len(scales)
        padded = torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(dtype), weight, group, corners)
        y = padded[:, :out_features].contiguous()
    return y.to(x.dtype) if bias is None else (y + bias).to(x.dtype)


def dequantize(weight: Tensor, scales: Tensor, zeros: Tensor | None, *, out_features: int) -> Tensor:
    """Float32 [out, in]."""
    codes, scale, zero = unpack(weight, scales, zeros, out_features=out_features)
    group = codes.shape[1] // scale.shape[1]
    return reference.dequantize_grouped(codes, scale, zero, bits=4, group_size=group, dtype=torch.float32)
