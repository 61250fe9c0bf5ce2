"""INT8 activations: the inputs of sites rounded per token while the model runs, as a server's integer kernels do.

Rounding is simulated: a site computes ``w @ x`` in floating point, with x rounded to its grid. An integer kernel gives
the same up to the order of its sums.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quantforge.errors import SourceError
from quantforge.model.observe import same_tensor
from quantforge.model.packed import PackedCheckpoint
from quantforge.model.streamed import StreamedModel
from quantforge.readers import ActivationScheme
from quantforge.spec import ActivationSpec


def quantize_tokens(values: torch.Tensor, spec: ActivationSpec) -> torch.Tensor:
    """Round each token of ``[..., in]`` to its own symmetric grid and back; same dtype, computed in it.

    Equal, bit for bit, to compressed-tensors 0.20.1 with strategy ``token`` and ``dynamic`` on ``[batch, tokens, in]``:
    the scale is ``max |x| / 127.5``, or the dtype's epsilon for a token of zeros; values are clamped to -128 .. 127 and
    rounded half to even. (Given two dims that library takes one scale for all tokens; servers do not, nor is it done
    here.)
    """
    half = 1 << (spec.bits - 1)
    scale = values.abs().amax(dim=-1, keepdim=True) / (half - 0.5)
    scale.masked_fill_(scale == 0, torch.finfo(values.dtype).eps)
    return (values / scale).clamp_(-half, half - 1).round_().mul_(scale)


class _InputHook:
    """Replaces a module's input. Sites that read one tensor get one rounded tensor, so that they still share a gram."""

    def __init__(self, spec: ActivationSpec) -> None:
        self.spec = spec
        self._last: tuple[torch.Tensor, int, torch.Tensor] | None = None  # input, its version, what it was rounded to

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = args[0] if args else kwargs["input"]
        if self._last is None or not same_tensor(self._last[0], self._last[1], value):
            self._last = (value, value._version, quantize_tokens(value, self.spec))
        rounded = self._last[2]
        return ((rounded, *args[1:]), kwargs) if args else (args, {**kwargs, "input": rounded})


@contextmanager
def quantized_inputs(modules: Iterable[nn.Module], spec: ActivationSpec | None) -> Iterator[None]:
    """While this is open, the modules' inputs are rounded per token; None changes nothing."""
    if spec is None:
        yield
        return
    hook = _InputHook(spec)
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def stored_activations(streamed: StreamedModel) -> Iterator[str | None]:
    """While this is open, a quantized checkpoint runs with its activations rounded where its config says so.

    Yields what is done, in words; None for a checkpoint whose activations stay in floating point. Raises SourceError
    when the config asks for what `ActivationSpec` cannot describe, or for a site that is no module of its own.
    """
    schemes = streamed.source.schemes if isinstance(streamed.source, PackedCheckpoint) else {}
    specs = {name: spec for name in schemes if (spec := activation_spec(schemes[name].activations, name)) is not None}
    if not specs:
        yield None
        return
    owners = {key: target.rpartition(".")[0] for target, key in streamed.keys.plain.items()}
    if strangers := [name for name in specs if f"{name}.weight" not in owners]:
        raise SourceError(
            f"activations of {len(strangers)} sites cannot be quantized, since the model has no module for each: "
            f"{', '.join(strangers[:3])}"
        )
    (spec,) = set(specs.values())  # there is only one kind
    modules = [streamed.model.get_submodule(owners[f"{name}.weight"]) for name in specs]
    with quantized_inputs(modules, spec):
        yield f"{spec.label()}, at {len(modules)} sites"


def activation_spec(scheme: ActivationScheme | None, site: str) -> ActivationSpec | None:
    """What a config says of a site's inputs as an ActivationSpec; SourceError for any other grid than that."""
    if scheme is None:
        return None
    if scheme != ActivationScheme(bits=8, kind="int", strategy="token", dynamic=True, symmetric=True):
        raise SourceError(
            f"{site}: {scheme.label()} cannot be run here, only 8-bit int activations, per token, dynamic, symmetric"
        )
    return ActivationSpec(scheme.bits)
