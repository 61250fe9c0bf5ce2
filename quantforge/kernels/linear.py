"""`PackedLinear`: a linear layer that keeps its codes packed and multiplies by them."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantforge.kernels import int4pack, native, panels, planar, reference, rows
from quantforge.kernels import ops as _ops  # noqa: F401  (registers the operators)
from quantforge.kernels.eager import MOST_TOKENS, Direct, Settings, Tensors, plain, unobserved
from quantforge.numerics.activations import quantize_tokens
from quantforge.spec import ActivationSpec

Activations = Literal["float", "int8-token", "int8-group"]
"""What is done to inputs: nothing; INT8 per token, as W8A8 checkpoints ask; INT8 for each group, for speed."""


BUFFERS = ("weight", "scales", "zeros", "input_order")


class Grid(NamedTuple):
    """A matrix as a reader gives it; see `PackedLinear.fill`."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_index: Tensor


class PackedLinear(nn.Module):
    """``y = x @ w.T + bias`` with ``w[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g]``, g the group of input i.

    Built empty, on whatever device its bias is wanted, and filled once (`fill`). Codes of 1 to 4 bits are kept in 4
    bits, more in 8. Inputs in groups by an order of their own (act-order) are sorted by group when the layer is
    filled, and x is permuted alike. Grids that no kernel has a place for (groups that end inside a word) stay unpacked
    bytes and are dequantized at every call; `layout` says so.

    Attributes:
        layout: ``panels`` or, without a compiled kernel, ``int4pack`` (CPU), ``planar`` or ``rows`` (GPU), ``plain``;
            ``empty`` before `fill`.
        weight, scales, zeros: buffers in that layout. `zeros` is None where all are the middle code.
        input_order: int64 [in], which input of x comes where; None when they stay in place.
        bias: a parameter [out], or None.
        direct: what the last call past the dispatcher was made with; None before the first and in copies.
    """

    direct: Direct | None = None
    weight: Tensor | None
    scales: Tensor | None
    zeros: Tensor | None
    input_order: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bits: int,
        bias: bool = False,
        activations: Activations = "float",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, bits
        self.activations: Activations = activations
        self.group_size, self.layout = -1, "empty"
        for name in BUFFERS:
            self.register_buffer(name, None)
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None
        )

    @property
    def stored_bits(self) -> int:
        """Bits that a code takes in memory."""
        return 4 if self.bits <= 4 else 8

    @property
    def rounds_groups(self) -> bool:
        """Whether inputs are rounded to INT8 by groups: asked for, and of 4-bit codes that a kernel reads."""
        return self.activations == "int8-group" and self.stored_bits == 4 and self.layout != "plain"

    @property
    def packed_bytes(self) -> int:
        """Bytes of codes, scales and zeros, padding included."""
        tensors = (self.weight, self.scales, self.zeros, self.input_order)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    # ------------------------------------------------------------------------------------------------ filling

    def fill(self, grid: Grid, device: torch.device | str = "cpu") -> None:
        """Pack a matrix for `device`.

        Args:
            grid: codes uint8 [out, in]; scales floats [out, groups]; zeros uint8 [out, groups]; group_index int64 [in].

        Raises:
            ValueError: shapes that are not this layer's, or groups that differ in size by more than a short last one.
        """
        expected = (self.out_features, self.in_features)
        if tuple(grid.codes.shape) != expected or tuple(grid.group_index.shape) != expected[1:]:
            raise ValueError(
                f"codes are {list(grid.codes.shape)} and group_index {list(grid.group_index.shape)}; "
                f"this layer is {list(expected)} [out, in]"
            )
        sizes = torch.bincount(grid.group_index, minlength=grid.scales.shape[1])
        self.group_size = int(sizes[0])
        if bool((sizes[:-1] != self.group_size).any()) or not 0 < int(sizes[-1]) <= self.group_size:
            raise ValueError(f"groups have {sorted(set(sizes.tolist()))} inputs; only the last may be shorter")
        codes, order = grid.codes, None
        if bool((grid.group_index.diff() < 0).any()):
            order = torch.argsort(grid.group_index, stable=True)
            codes = codes[:, order].contiguous()
        middle = 1 << (self.stored_bits - 1)
        zeros = None if bool((grid.zeros == middle).all()) else grid.zeros
        self._place(codes, grid.scales, zeros, order, torch.device(device))

    def _place(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, device: torch.device
    ) -> None:
        """Pack what is already sorted by group."""
        bits, group = self.stored_bits, self.group_size
        if self.activations == "int8-group" and device.type != "cpu":
            raise ValueError(f"int8-group rounds inputs on the CPU only, not on {device}; load with float activations")
        self.layout = self._layout_for(device, zeros)
        packed: tuple[Tensor, Tensor, Tensor | None]
        if self.layout == "plain":
            packed = codes, scales, zeros
        elif self.layout == "panels":
            packed = panels.pack(codes, scales, zeros, bits=bits, group_size=group)
        elif self.layout == "int4pack":
            packed = int4pack.pack(codes, scales, zeros)
        elif self.layout == "planar":
            moved = None if zeros is None else zeros.to(device)
            packed = planar.pack(codes.to(device), scales.to(device), moved, bits=bits, group_size=group)
        else:
            packed = (*rows.pack(codes.to(device), scales.to(device)), None)
        self.weight, self.scales = packed[0].to(device), packed[1].to(device)
        self.zeros = None if packed[2] is None else packed[2].to(device)
        self.input_order = None if order is None else order.to(device)

    def _layout_for(self, device: torch.device, zeros: Tensor | None) -> str:
        """How codes lie on a device; on a GPU alike whether kernels run there or not (`gpu` says how it multiplies)."""
        if device.type == "cuda":
            if self._whole_int8(zeros is None):
                return "rows"
            fits = self.group_size >= self.in_features or self.group_size % 16 == 0
            return "planar" if fits else "plain"
        if device.type != "cpu" or not panels.fits(self.in_features, self.group_size, self.stored_bits):
            return "plain"
        stock = int4pack.fits(self.in_features, self.group_size, self.stored_bits) and int4pack.available()
        return "int4pack" if stock and native.status().library is None else "panels"

    def _whole_int8(self, symmetric: bool) -> bool:
        """Whether w8a8_linear computes this layer: symmetric 8-bit codes, one scale a row, x rounded per token.

        Rows of more products than an int32 can sum are left to w8a16_linear, on rounded inputs.
        """
        whole = self.bits == 8 and symmetric and self.group_size >= self.in_features and rows.fits(self.in_features)
        return whole and self.activations == "int8-token"

    def grid(self) -> Grid:
        """What the layer was filled with, to the last bit, on the CPU."""
        if self.weight is None or self.scales is None:
            raise ValueError("the layer is empty; fill it first")
        codes, scales, zeros = self._unpacked()
        if zeros is None:
            zeros = torch.full(scales.shape, 1 << (self.stored_bits - 1), dtype=torch.uint8)
        index = reference.contiguous_groups(self.in_features, self.group_size)
        if self.input_order is not None:
            back = torch.argsort(self.input_order.cpu())
            codes, index = codes[:, back].contiguous(), index[back]
        return Grid(codes, scales, zeros, index)

    def _unpacked(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales and zeros on the CPU, inputs sorted by group."""
        assert self.weight is not None and self.scales is not None
        weight, scales = self.weight.cpu(), self.scales.cpu()
        zeros = None if self.zeros is None else self.zeros.cpu()
        if self.layout == "plain":
            return weight, scales, zeros
        if self.layout == "int4pack":
            return int4pack.unpack(weight, scales, zeros, out_features=self.out_features)
        sizes = {"out_features": self.out_features, "in_features": self.in_features}
        if self.layout == "rows":
            return (*rows.unpack(weight, scales, **sizes), None)
        layout: Any = panels if self.layout == "panels" else planar
        found: tuple[Tensor, Tensor, Tensor | None] = layout.unpack(
            weight, scales, zeros, bits=self.stored_bits, group_size=self.group_size, **sizes
        )
        return found

    def dequantize(self) -> Tensor:
        """Float32 [out, in], on the CPU."""
        found = self.grid()
        return reference.dequantize(*found, bits=self.bits, dtype=torch.float32)

    # ------------------------------------------------------------------------------------------------ running

    def forward(self, x: Tensor) -> Tensor:
        if unobserved(x) and (y := self._at_once(x)) is not None:
            return y
        if self.input_order is not None:
            x = x.index_select(-1, self.input_order)
        if self.activations == "int8-token" and not self._whole_int8(self.zeros is None):
            x = quantize_tokens(x, ActivationSpec(8))
        weight, scales, zeros, bias = self.weight, self.scales, self.zeros, self.bias
        if weight is None or scales is None:
            raise ValueError("the layer is empty; fill it before it is called")
        if self.layout == "plain":
            plain = reference.dequantize_grouped(
                weight, scales, zeros, bits=self.stored_bits, group_size=self.group_size, dtype=torch.float32
            )
            return functional.linear(x, plain.to(x.dtype), bias)
        operators = torch.ops.quantforge
        found: Tensor
        if self._whole_int8(zeros is None):
            found = operators.w8a8_linear(x, weight, scales, bias, self.out_features)
        else:
            name = "w8a16" if self.stored_bits == 8 else "w4a8" if self.rounds_groups else "w4a16"
            operator = getattr(operators, f"{name}_linear")
            found = operator(x, weight, scales, zeros, bias, self.group_size, self.out_features)
        return found

    def _at_once(self, x: Tensor) -> Tensor | None:
        """The same for a few tokens on the CPU, past the dispatcher; None for what needs an operator."""
        count, dtype, bias = self.in_features, x.dtype, self.bias
        if self.layout != "panels" or not 0 < x.numel() <= MOST_TOKENS * count or x.shape[-1:] != (count,):
            return None
        own = self._buffers
        try:
            weight, scales, zeros, order = own["weight"], own["scales"], own["zeros"], own["input_order"]
        except KeyError:  # somebody has made a parameter of one, or a property
            return None
        if weight is None or scales is None or (bias is not None and bias.dtype is not dtype):
            return None
        if order is not None:
            x = x.index_select(-1, order)
        if not x.is_contiguous():
            return None
        settings = (self.stored_bits, self.group_size, self.out_features, count, self.bits, self.activations)
        tensors = (weight, scales, zeros, bias)
        direct = self.direct
        if direct is None or not direct.serves(settings, tensors, dtype):
            direct = self.direct = self._prepared(settings, tensors, dtype)
        return None if direct is None else native.linear(direct.library, direct.matrix, x)

    def _prepared(self, settings: Settings, tensors: Tensors, dtype: torch.dtype) -> Direct | None:
        library = native.status().library
        rounds = self.rounds_groups or self._whole_int8(tensors[2] is None)
        if library is None or dtype not in native.TYPES or (self.activations == "int8-token" and not rounds):
            return None
        if not all(tensor is None or plain(tensor) for tensor in tensors):
            return None
        return Direct(library, settings, tensors, dtype, integers=rounds)

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses, which mean nothing to a copy."""
        return self.__dict__ | {"direct": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        """Moves to another kind of device pack anew; changes of dtype reach the bias alone: scales stay exact."""
        if self.bias is not None:
            self.bias = nn.Parameter(fn(self.bias.data), requires_grad=self.bias.requires_grad)
        if self.weight is None:
            return self
        device = fn(torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)).device
        if device.type == self.weight.device.type or device.type == "meta":
            for name in BUFFERS:
                if (tensor := getattr(self, name)) is not None:
                    setattr(self, name, tensor.to(device))
        else:
            self._place(*self._unpacked(), self.input_order, device)
        return self

    def extra_repr(self) -> str:
        """Sizes, grid, layout and bytes."""
        group = "per channel" if self.group_size in (-1, self.in_features) else f"group {self.group_size}"
        order = ", act-order" if self.input_order is not None else ""
        rounded = "" if self.activations == "float" else f", activations {self.activations}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.bits} bits {group}{order}{rounded}, {self.layout}, {self.packed_bytes} bytes"
        )
