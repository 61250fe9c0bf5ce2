"""A packed layer's call on the CPU past torch's dispatcher, where nobody could tell the difference.

An operator of `ops` costs tens of microseconds of Python before the compiled kernel starts: torch calls Python for the
gradient, then for the arithmetic, which checks every tensor anew; and a small model's token takes hundreds of calls.
`Direct` is what was checked once, and calls the kernel; the bits are the same. Whatever wants to see operators
(gradients, compilers, tracers, transforms, modes, profilers) gets them: `unobserved` tells when there is none.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from quantforge.kernels import native
from quantforge.kernels.ops import checked

Settings = tuple[Any, ...]
Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

MOST_TOKENS = 64
"""With more, the dispatcher's time does not show, and `ops` may have a better way."""


def _key_sets(*names: tuple[str, ...]) -> frozenset[int]:
    """Sets of torch's dispatch keys, as numbers; none for a torch that calls them otherwise."""
    found = set()
    for keys in names:
        try:
            made: Any = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, keys[0]))
            for name in keys[1:]:
                made = made.add(getattr(torch._C.DispatchKey, name))
            found.add(made.raw_repr())
        except (AttributeError, TypeError):
            return frozenset()
    return frozenset(found)


QUIET = _key_sets(("BackendSelect", "ADInplaceOrView"), ("BackendSelect",))
"""The keys of a thread without modes, transforms and tracers; the second in inference mode."""
PLAIN = _key_sets(("CPU", "AutocastCPU", "ADInplaceOrView", "AutogradCPU"), ("CPU", "AutocastCPU"))
"""Those of an ordinary tensor on the CPU; the second of one made in inference mode."""


KNOWN = (
    bool(QUIET and PLAIN)
    and all(
        hasattr(torch._C, name)
        for name in ("_dispatch_tls_local_include_set", "_dispatch_keys", "_len_torch_function_stack")
    )
    and hasattr(torch._C._autograd, "_profiler_enabled")
)
"""Whether this torch can be asked. Else every call takes the operator's way."""


def unobserved(x: Tensor) -> bool:
    """Whether all that an operator would do with `x` now is the CPU's arithmetic.

    Wrapped and lazily negated tensors have keys of their own. Compilers read False here.
    """
    return (
        KNOWN
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_function_stack()
        and torch._C._dispatch_tls_local_include_set().raw_repr() in QUIET
        and torch._C._dispatch_keys(x).raw_repr() in PLAIN
        and not x.requires_grad
        and not torch._C._autograd._profiler_enabled()
    )


def plain(tensor: Tensor) -> bool:
    """Whether a tensor, or a parameter, is numbers in the CPU's memory one after another, and nothing else."""
    return torch._C._dispatch_keys(tensor).raw_repr() in PLAIN and tensor.is_contiguous() and not tensor.requires_grad


class Direct:
    """A layer as the compiled kernel is told of it: addresses, and all that has to stay for them to be right.

    Args:
        settings: of the layer: bits, group_size, out_features, in_features, and whatever else changes results.
        tensors: weight, scales, zeros and bias of the layer, `plain` ones; they are not kept alive.
        dtype: of its inputs.
        integers: as `native.Matrix` has it.

    Raises ValueError for tensors that do not belong together.
    """

    def __init__(
        self, library: Any, settings: Settings, tensors: Tensors, dtype: torch.dtype, *, integers: bool
    ) -> None:
        weight, scales, zeros, bias = tensors
        bits, group_size, out_features, in_features = settings[:4]
        x = torch.empty(0, in_features, dtype=dtype, device="cpu")
        group = checked(x, weight, scales, zeros, bias, bits, group_size, out_features)
        sizes = native.Sizes(bits, out_features, in_features, group)
        self.library, self.settings, self.dtype = library, settings, dtype
        self.matrix = native.Matrix(weight, scales, zeros, bias, dtype, sizes, integers=integers)
        self.known = [_nothing if tensor is None else weakref.ref(tensor) for tensor in tensors]
        self.facts = _facts(tensors)

    def serves(self, settings: Settings, tensors: Tensors, dtype: torch.dtype) -> bool:
        """Whether these are the settings and tensors, unchanged but for their numbers, and the library is in use."""
        weight, scales, zeros, bias = self.known
        return (
            dtype is self.dtype
            and settings == self.settings
            and tensors[0] is weight()
            and tensors[1] is scales()
            and tensors[2] is zeros()
            and tensors[3] is bias()
            and _facts(tensors) == self.facts
            and native.status().library is self.library
        )


def _nothing() -> None:
    """What stands for a reference to a tensor that is not there."""


def _facts(tensors: Tensors) -> tuple[Any, ...]:
    """What can change of a tensor that stays the same object, besides its numbers. Spelled out: each call asks."""
    w, s, z, b = tensors
    facts: tuple[Any, ...] = (
        w.data_ptr(),
        w.numel(),
        w.dtype,
        w.is_contiguous(),
        s.data_ptr(),
        s.numel(),
        s.dtype,
        s.is_contiguous(),
        s.requires_grad,
    )
    if z is not None:
        facts += (z.data_ptr(), z.numel(), z.dtype, z.is_contiguous())
    if b is not None:
        facts += (b.data_ptr(), b.numel(), b.dtype, b.is_contiguous(), b.requires_grad)
    return facts
