"""Input statistics of a decoder layer's sites: one Gram for each set of sites that read the same tensor."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from quantforge.errors import NumericsError
from quantforge.model.streamed import StreamedPass
from quantforge.numerics.gram import GramAccumulator


class _Observed(Exception):
    """Every site has been seen; the rest of the layer need not run. Never leaves this module."""


@dataclass(frozen=True, eq=False)
class InputGroup:
    """Sites that share an input.

    Attributes:
        names: their module paths, in the order they are called.
        gram: mean outer product of the input rows, [in, in].
        tokens: input rows seen.
    """

    names: tuple[str, ...]
    gram: torch.Tensor
    tokens: int


class _Watch:
    """Forward pre-hooks on the sites of one layer."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.order: list[str] = []  # calls of the first batch, repeats included
        self.groups: dict[str, list[str]] = {}  # leader -> members, from the first batch
        self.grams: dict[str, GramAccumulator] = {}
        self._inputs: list[tuple[str, torch.Tensor]] = []  # kept alive while pointers are compared
        self._first = True
        self._calls = 0

    def batch_done(self) -> None:
        self._first = False
        self._inputs.clear()
        self._calls = 0

    def hook(self, name: str) -> "torch.utils.hooks.RemovableHandle":
        return self.modules[name].register_forward_pre_hook(
            lambda module, args, kwargs: self._seen(name, args[0] if args else kwargs["input"]), with_kwargs=True
        )

    def _seen(self, name: str, value: torch.Tensor) -> None:
        if self._first:
            leader = next((n for n, other in self._inputs if _same(other, value)), name)
            self._inputs.append((name, value))
            self.order.append(name)
            members = self.groups.setdefault(leader, [])
            if name not in members:
                members.append(name)
        if name in self.groups:
            if name not in self.grams:
                self.grams[name] = GramAccumulator(value.shape[-1], name)
            self.grams[name].add(value)
        self._calls += 1
        if not self._first and self._calls == len(self.order):
            raise _Observed


@torch.no_grad()
def observe(run: StreamedPass, index: int, modules: Mapping[str, nn.Module]) -> list[InputGroup]:
    """Feed a layer's recorded inputs through it and gather statistics of the given sites' inputs.

    Args:
        run: the pass, its hidden states being the input of layer `index`, which must be loaded.
        modules: module path -> module, the sites to watch.

    Raises NumericsError when a site was never called (its statistics would be empty) or saw non-finite inputs.
    """
    watch = _Watch(modules)
    hooks = [watch.hook(name) for name in modules]
    layer = run.owner.layers[index]
    try:
        for call, hidden in run.batches(index):
            with suppress(_Observed):
                call.run(layer, hidden)
            watch.batch_done()
    finally:
        for handle in hooks:
            handle.remove()
    unseen = [name for name in modules if name not in watch.order]
    if unseen:
        raise NumericsError(
            f"layer {index}: {', '.join(unseen)} never received an input during calibration; exclude with --ignore"
        )
    return [
        InputGroup(tuple(members), watch.grams[leader].mean(), watch.grams[leader].tokens)
        for leader, members in watch.groups.items()
    ]


@torch.no_grad()
def input_groups(run: StreamedPass, index: int, modules: Mapping[str, nn.Module]) -> Sequence[tuple[str, ...]]:
    """The sets of sites that share an input, in call order, from one sequence; no statistics."""
    watch = _Watch(modules)
    hooks = [watch.hook(name) for name in modules]
    try:
        call, hidden = next(run.batches(index))
        call.run(run.owner.layers[index], hidden)
    finally:
        for handle in hooks:
            handle.remove()
    return [tuple(members) for members in watch.groups.values()]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
