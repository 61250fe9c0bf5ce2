"""Input statistics of a decoder layer's sites: one Gram for each set of sites that read the same tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import clear_frames
from types import MappingProxyType

import torch
from torch import nn

from quantforge.errors import NumericsError
from quantforge.model.streamed import StreamedPass
from quantforge.numerics.activations import quantize_tokens
from quantforge.numerics.channels import MagnitudeAccumulator, Magnitudes
from quantforge.numerics.gram import GramAccumulator
from quantforge.spec import ActivationSpec


class _Observed(Exception):
    """Every site has been seen; the rest of the layer need not run. Never leaves this module."""


@dataclass(frozen=True, eq=False)
class InputGroup:
    """Sites that share an input.

    Attributes:
        names: their module paths, in the order they are called.
        gram: mean outer product of the input rows, each times its weight, [in, in].
        tokens: input rows seen; 0, with an empty gram, for a site that was never called.
        magnitudes: of the inputs, when they were asked for.
    """

    names: tuple[str, ...]
    gram: torch.Tensor
    tokens: int
    magnitudes: Magnitudes | None = None

    def divided(self, scale: torch.Tensor) -> "InputGroup":
        """The same sites when their inputs are divided by `scale` [in]."""
        if not self.tokens:
            return self
        magnitudes = self.magnitudes.divided(scale) if self.magnitudes is not None else None
        return InputGroup(self.names, self.gram / (scale * scale.unsqueeze(1)), self.tokens, magnitudes)


class _Watch:
    """Forward pre-hooks on the sites of one layer."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        rows_per_batch: int | None = None,
        weights: Mapping[str, torch.Tensor] = MappingProxyType({}),
        rounded: ActivationSpec | None = None,
        whole: bool = False,
    ) -> None:
        self.modules = modules
        self.weights = weights  # by module path, [tokens of all batches]
        self.batch_tokens = 0  # of the batch that is running
        self.rounded = rounded
        self.whole = whole  # the layer runs to its end
        self._tokens_done = 0  # in the batches before this one
        self.rows_per_batch = rows_per_batch  # of the sample of inputs; None when no magnitudes are asked for
        self.magnitudes: dict[str, MagnitudeAccumulator] = {}
        self.groups: dict[str, list[str]] = {}  # leader -> members, in the order they are first called
        self.grams: dict[str, GramAccumulator] = {}
        self._leader: dict[str, str] = {}
        self._first_calls: list[str] | None = None  # of the first batch, repeats included
        self._calls: list[str] = []
        self._inputs: list[tuple[str, torch.Tensor, int]] = []  # of this batch, kept alive while pointers are compared

    def batch_done(self) -> None:
        self._tokens_done += self.batch_tokens
        if self._first_calls is None:
            self._first_calls = self._calls
        self._calls = []
        self._inputs.clear()

    def hook(self, name: str) -> "torch.utils.hooks.RemovableHandle":
        return self.modules[name].register_forward_pre_hook(
            lambda module, args, kwargs: self._seen(name, args[0] if args else kwargs["input"]), with_kwargs=True
        )

    def _seen(self, name: str, value: torch.Tensor) -> None:
        self._calls.append(name)
        same = [other for other, tensor, version in self._inputs if same_tensor(tensor, version, value)]
        if name not in self._leader:
            # a site first reached in a later batch has statistics of its own: it has not seen all its siblings' inputs
            self._leader[name] = self._leader[same[0]] if same and self._first_calls is None else name
            self.groups.setdefault(self._leader[name], []).append(name)
        leader = self._leader[name]
        if leader == name:
            rows = value if self.rounded is None else quantize_tokens(value, self.rounded)
            weights = self._weights(name, rows)
            self.grams.setdefault(name, GramAccumulator(rows.shape[-1], name)).add(rows, weights)
            if self.rows_per_batch is not None:
                self.magnitudes.setdefault(name, MagnitudeAccumulator(self.rows_per_batch)).add(rows, weights)
        elif leader not in same:
            raise NumericsError(
                f"{name} shares its input with {leader} for some calibration tokens and not for others; "
                f"leave it alone with --ignore {name}"
            )
        self._inputs.append((name, value, value._version))
        if not self.whole and self._calls == self._first_calls and self.modules.keys() == set(self._calls):
            raise _Observed  # nothing that is still to come is watched

    def _weights(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        """The weights of the tokens of this batch."""
        if name not in self.weights:
            return None
        rows = value.numel() // value.shape[-1]
        own = self.weights[name][self._tokens_done : self._tokens_done + self.batch_tokens]
        if not rows == self.batch_tokens == len(own):
            raise NumericsError(
                f"{name}: {rows} input rows for {self.batch_tokens} tokens with {len(own)} weights; "
                "--token-weights none counts all tokens alike"
            )
        return own


@torch.no_grad()
def observe(
    run: StreamedPass,
    index: int,
    modules: Mapping[str, nn.Module],
    rows_per_batch: int | None = None,
    weights: Mapping[str, torch.Tensor] = MappingProxyType({}),
    rounded: ActivationSpec | None = None,
    advance: bool = False,
) -> list[InputGroup]:
    """Feed a layer's recorded inputs through it and gather statistics of the given sites' inputs.

    Args:
        run: the pass, its hidden states being the input of layer `index`, which must be loaded.
        modules: module path -> module, the sites to watch.
        rows_per_batch: when given, magnitudes of the inputs are gathered too, and so many rows of each batch.
        weights: module path -> [samples * length], how much each token counts; sites that share an input must share
            them. A site without any counts all tokens alike.
        rounded: when given, the statistics are those of the inputs rounded to this grid, while the layer itself goes on
            with the inputs as they are.
        advance: also replace the hidden states by the layer's output, as `StreamedPass.advance` does; in one pass.

    A site that was never called comes back with 0 tokens. Raises NumericsError when a site saw non-finite inputs.
    """
    watch = _Watch(modules, rows_per_batch, weights, rounded, whole=advance)
    hooks = [watch.hook(name) for name in modules]
    layer = run.owner.layers[index]
    try:
        for (call, hidden), place in zip(run.batches(index), torch.split(run.hidden, run.batch_size), strict=True):
            watch.batch_tokens = hidden.shape[0] * hidden.shape[1]
            try:
                output = call.run(layer, hidden)
                if advance:
                    place.copy_(output[0] if isinstance(output, tuple | list) else output)  # a view into run.hidden
            except _Observed as stop:
                clear_frames(stop.__traceback__)  # they hold activations, in cycles that are collected much later
            watch.batch_done()
    finally:
        for handle in hooks:
            handle.remove()
    found = [
        InputGroup(
            tuple(members),
            watch.grams[leader].mean(),
            watch.grams[leader].tokens,
            watch.magnitudes[leader].result() if leader in watch.magnitudes else None,
        )
        for leader, members in watch.groups.items()
    ]
    return found + [unobserved(name) for name in modules if all(name not in group.names for group in found)]


def unobserved(name: str) -> InputGroup:
    """The group of a site without statistics."""
    return InputGroup((name,), torch.empty(0), 0)


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
    found = [tuple(members) for members in watch.groups.values()]
    return found + [(name,) for name in modules if all(name not in names for names in found)]


def same_tensor(known: torch.Tensor, version: int, value: torch.Tensor) -> bool:
    """True when `value` is the tensor seen before, and nothing was written into it since."""
    place = known.data_ptr() == value.data_ptr() and known.shape == value.shape and known.stride() == value.stride()
    return place and known._version == version == value._version
