"""A packed layer's call on the CPU past torch's dispatcher, where nobody could tell the difference.

An operator of `ops` costs tens of microseconds of Python before the compiled kernel starts: torch calls Python for the
gradient, then for the arithmetic, which checks every tensor anew; and a small model's token takes hundreds of calls.
`Direct` is what was checked once, and calls the kernel; the bits are the same. Whatever wants to see operators
(gradients, compilers, tracers, transforms, modes, profilers) gets them: `unobserved` tells when there is none.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from quantforge.kernels import native
from quantforge.kernels.ops import checked

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
    and hasattr(torch._C, "_dispatch_tls_local_include_set")
    and hasattr(torch._C, "_dispatch_keys")
    and hasattr(profiler, "_is_profiler_enabled")
)
"""Whether this torch can be asked. Else every call takes the operator's way."""


def unobserved(x: Tensor) -> bool:
    """Whether all that an operator would do with `x` now is the CPU's arithmetic.

    Subclasses, wrapped and lazily negated tensors have keys of their own. Compilers read False here.
    """
    return (
        KNOWN
        and not torch.compiler.is_compiling()
        and torch._C._dispatch_tls_local_include_set().raw_repr() in QUIET
        and torch._C._dispatch_keys(x).raw_repr() in PLAIN
        and not x.requires_grad
        and not profiler._is_profiler_enabled
    )


class Direct:
    """A layer's tensors in the layout `panels`, and the dtype of its inputs, as the compiled kernel is told of them.

    They are checked here, once; ValueError for what does not belong together. `integers` as `native.Matrix` has it.
    """

    def __init__(
        self, library: Any, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
        dtype: torch.dtype, bits: int, group_size: int, out_features: int, in_features: int, *, integers: bool,
    ) -> None:  # fmt: skip
        x = torch.empty(0, in_features, dtype=dtype)
        sizes = native.Sizes(
            bits, out_features, in_features, checked(x, weight, scales, zeros, bits, group_size, out_features)
        )
        self.library = library
        self.matrix = native.Matrix(weight, scales, zeros, bias, dtype, sizes, integers=integers)

    def serves(self, buffers: Mapping[str, Tensor | None], bias: Tensor | None, x: Tensor) -> bool:
        """Whether the layer's tensors are still these, where they were, the library is in use, and x of the dtype."""
        matrix, weight, scales, zeros = self.matrix, buffers["weight"], buffers["scales"], buffers["zeros"]
        return (
            weight is matrix.weight
            and scales is matrix.scales
            and zeros is matrix.zeros
            and bias is matrix.bias
            and (bias is None or not bias.requires_grad)
            and x.dtype is matrix.dtype
            and native.status().library is self.library
            and matrix.addresses
            == (
                weight.data_ptr(),
                scales.data_ptr(),
                None if zeros is None else zeros.data_ptr(),
                None if bias is None else bias.data_ptr(),
            )
        )
