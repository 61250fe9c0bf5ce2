"""One decoder layer replayed while what goes in and out of its modules is written down, and how two replays differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.model.streamed import LayerCall

SCALED = 1e-4
"""A column is another one scaled when they differ by no more than this share of its norm."""


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of one module: its arguments, tensors copied, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def tensors(self) -> dict[int | str, Tensor]:
        """The floating point arguments by place or keyword."""
        found: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return {key: value for key, value in found if isinstance(value, Tensor) and value.is_floating_point()}

    def run(self, module: nn.Module) -> Any:
        return module(*self.args, **self.kwargs)

    def scaled(self, key: int | str, factor: Tensor) -> "ModuleCall":
        """The same call with one argument's channels multiplied."""
        return ModuleCall(*_multiplied(self.args, self.kwargs, key, factor), self.output)


@dataclass(frozen=True, eq=False)
class Trace:
    """The calls of every module that has parameters of its own, and all tensors that leave the layer."""

    calls: dict[str, list[ModuleCall]]
    result: list[Tensor]


def _multiplied(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, factor: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(key, str):
        return args, kwargs | {key: kwargs[key] * factor.to(kwargs[key].dtype)}
    return (*args[:key], args[key] * factor.to(args[key].dtype), *args[key + 1 :]), kwargs


def trace_layer(
    layer: nn.Module,
    call: LayerCall,
    hidden: Tensor,
    compensate: Mapping[str, tuple[int | str, Tensor]] | None = None,
) -> Trace:
    """Replay a layer; `compensate` multiplies an argument of some modules, after it was recorded."""
    calls: dict[str, list[ModuleCall]] = {}
    started: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handles = []

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            started.append((_copied(args), _copied(kwargs)))
            if compensate and name in compensate:
                return _multiplied(args, kwargs, *compensate[name])
            return None

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls.setdefault(name, []).append(ModuleCall(*started.pop(), _copied(output)))

        return hook

    for name, module in layer.named_modules():
        if name and module._parameters:
            handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(after(name)))
    try:
        output = call.run(layer, hidden.clone())
    finally:
        for handle in handles:
            handle.remove()
    return Trace(calls, list(tensors_in((output, call.args, call.kwargs))))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def distance(reference: list[Tensor], other: list[Tensor]) -> tuple[float, float]:
    """(largest difference of a token relative to its norm, norm of all differences); infinite when shapes differ."""
    if [tensor.shape for tensor in reference] != [tensor.shape for tensor in other]:
        return torch.inf, torch.inf
    worst = total = 0.0
    for a, b in zip(reference, other, strict=True):
        if not a.is_floating_point() or a.ndim == 0 or a is b:
            continue
        apart = (a.double() - b.double()).nan_to_num().norm(dim=-1)  # masks hold infinities
        norm = a.double().nan_to_num(posinf=0, neginf=0).norm(dim=-1)
        worst = max(worst, float((apart / norm.clamp(min=1e-30)).masked_fill(apart == 0, 0).max()))
        total += float(apart.square().sum())
    return worst, total**0.5


def scaled_argument(reference: list[ModuleCall], other: list[ModuleCall], scale: Tensor) -> int | str | None:
    """Which argument of a module is, in `other`, its value in `reference` divided by `scale`; None when none is."""
    if not reference or len(reference) != len(other):
        return None
    for key in reference[0].tensors():
        pairs = [(a.tensors().get(key), b.tensors().get(key)) for a, b in zip(reference, other, strict=True)]
        if all(a is not None and b is not None and is_scaled(a, b, scale) for a, b in pairs):
            return key
    return None


def is_scaled(reference: Tensor, other: Tensor, scale: Tensor) -> bool:
    """True when every column of `other` is that of `reference` divided by its scale."""
    if reference.shape != other.shape or not reference.ndim or reference.shape[-1] != len(scale):
        return False
    a, b = (tensor.reshape(-1, len(scale)).double() for tensor in (reference, other))  # [tokens, channels]
    norms = a.norm(dim=0)
    apart = (b * scale.double() - a).norm(dim=0)
    return bool((apart <= SCALED * norms + 1e-2 * SCALED * norms.max()).all()) and float(norms.max()) > 0
