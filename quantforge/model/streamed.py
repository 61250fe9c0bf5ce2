"""A model whose decoder layers are loaded, run and dropped one at a time.

The model's own forward runs once with stand-ins for its layers. Each stand-in records the exact arguments of its layer,
so that every layer is later replayed with its own arguments: masks, rotary tables and the like differ between layers of
one model (sliding and full attention), and re-using the first layer's would be silently wrong.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any

import torch
from torch import nn

from quantforge.errors import SourceError
from quantforge.model.sites import ModelLayout, read_layout
from quantforge.model.skeleton import build_skeleton, fill, find_stack, map_keys, settle_ties
from quantforge.model.source import TensorSource

TOKENS_PER_BATCH = 2048


class _Stop(Exception):
    """Ends a forward pass early; never leaves this module."""


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one decoder layer for one batch; the hidden states' place is left open.

    `position` is the index of the hidden states in `args`, or None when they are the keyword ``hidden_states``.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int | None

    def run(self, layer: nn.Module, hidden: torch.Tensor) -> Any:
        args, kwargs = list(self.args), dict(self.kwargs)
        if self.position is None:
            kwargs["hidden_states"] = hidden
        else:
            args[self.position] = hidden
        return layer(*args, **kwargs)


class _StandIn(nn.Module):
    """Takes a decoder layer's place and returns what `on_call(args, kwargs)` does; attributes read through."""

    def __init__(self, inner: nn.Module, on_call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.__dict__["inner"] = inner
        self.__dict__["on_call"] = on_call

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["inner"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["on_call"](args, kwargs)


class StreamedModel:
    """Owns the skeleton and whatever weights are loaded at the moment.

    Attributes:
        layout: sites and kept parameters.
        duplicates: checkpoint keys that repeat, byte for byte, a tensor they are tied to.
        untied: parameters that config.json ties to another but the checkpoint holds with other values; kept apart.
        peak_elements: the most parameter elements that were ever real (not on the meta device) at once.
    """

    def __init__(
        self,
        source: TensorSource,
        device: str = "cpu",
        *,
        trust_remote_code: bool = False,
        skeleton: nn.Module | None = None,
    ) -> None:
        """Build the skeleton, unless it was built before, and find out what of `source` belongs where."""
        self.source = source
        self.device = torch.device(device)
        tensors = len(source.keys())
        self.model = skeleton or build_skeleton(source.path, trust_remote_code=trust_remote_code, tensors=tensors)
        self.keys = map_keys(self.model, source.keys())
        self.duplicates, self.untied = settle_ties(self.model, source, self.keys)
        self.layout: ModelLayout = read_layout(self.model, self.keys)
        self.layers: nn.ModuleList = find_stack(self.model)[1]
        self.peak_elements = 0
        self._outer_loaded = False

    @property
    def text_config(self) -> Any:
        """The language model's part of the config, as transformers reads it."""
        config: Any = self.model.config
        return config.get_text_config()

    @property
    def positions(self) -> int | None:
        """The longest sequence that the config allows; None when it names no limit."""
        longest = getattr(self.text_config, "max_position_embeddings", None)
        return longest if isinstance(longest, int) else None

    # -------------------------------------------------------------------------------------------- weights

    def load_outer(self) -> None:
        """Load everything that is not in a decoder layer: embeddings, final norm, output head."""
        if self._outer_loaded:
            return
        plain, converted = self.keys.keys_outside(f"{self.layout.stack}.")
        fill(self.model, self.source, plain, converted, self.keys.mapping, self.device)
        missing = set(self.model.state_dict()) - self.keys.plain.keys()
        self.model.tie_weights(missing_keys=missing)  # type: ignore[operator]
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(self.device)
        left = [n for n, p in self.model.named_parameters() if p.is_meta and not n.startswith(f"{self.layout.stack}.")]
        if left:
            raise SourceError(f"{self.source.path}: no tensor for {len(left)} parameters: {', '.join(left[:3])}")
        self._outer_loaded = True
        self._note_peak()

    def drop_outer(self) -> None:
        """Forget the outer weights."""
        stack = self.layout.stack
        for name, parameter in list(self.model.named_parameters()):
            if not name.startswith(f"{stack}."):
                owner, _, leaf = name.rpartition(".")
                self.model.get_submodule(owner)._parameters[leaf] = _to_meta(parameter)
        self.model.tie_weights()  # type: ignore[operator]
        self._outer_loaded = False

    def load_layer(self, index: int) -> nn.Module:
        """Load one decoder layer as float32 on the device."""
        plain, converted = self.keys.keys_below(f"{self.layout.stack}.{index}.")
        fill(self.model, self.source, plain, converted, self.keys.mapping, self.device)
        layer = self.layers[index]
        left = [name for name, parameter in layer.named_parameters() if parameter.is_meta]
        if left:
            raise SourceError(f"{self.source.path}: layer {index} has no tensor for {', '.join(left[:3])}")
        self._note_peak()
        return layer

    def drop_layer(self, index: int) -> None:
        """Forget one decoder layer's weights."""
        for module in self.layers[index].modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[leaf] = _to_meta(parameter)
        _trim_heap()

    def _note_peak(self) -> None:
        real = sum(parameter.numel() for parameter in self.model.parameters() if not parameter.is_meta)
        self.peak_elements = max(self.peak_elements, real)

    # -------------------------------------------------------------------------------------------- forward

    @torch.no_grad()
    def begin(self, tokens: torch.Tensor) -> "StreamedPass":
        """Run embeddings and everything else before the decoder layers on int64 tokens [samples, length]."""
        self.load_outer()
        batch_size = max(1, TOKENS_PER_BATCH // tokens.shape[1])
        batches = list(torch.split(tokens, batch_size))
        returns = self._probe_return(batches[0][:1])
        interner = _Interner()
        calls: list[list[LayerCall]] = [[] for _ in self.layers]
        hidden = torch.empty(0)
        for number, batch in enumerate(batches):
            first = self._record(batch, returns, calls, interner)
            if first.shape[:-1] != batch.shape:
                raise SourceError(
                    f"{type(self.model).__name__} gives its decoder layers hidden states {list(first.shape)} for "
                    f"tokens {list(batch.shape)}; layer-by-layer streaming does not support this architecture"
                )
            if number == 0:
                hidden = torch.empty(*tokens.shape, first.shape[-1])
            hidden[number * batch_size :][: len(batch)] = first.cpu()
        return StreamedPass(self, tokens, calls, hidden, batch_size, returns)

    def _probe_return(self, tokens: torch.Tensor) -> int:
        """0 when a decoder layer returns a tensor, else the length of the tuple it returns."""
        seen: list[LayerCall] = []
        first: list[torch.Tensor] = []

        def stop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, call = _split(args, kwargs)
            seen.append(call)
            first.append(hidden)
            raise _Stop

        self._forward(tokens, lambda index: stop)
        output = seen[0].run(self.load_layer(0), first[0])
        self.drop_layer(0)
        return len(output) if isinstance(output, tuple | list) else 0

    def _record(
        self, tokens: torch.Tensor, returns: int, calls: list[list[LayerCall]], interner: "_Interner"
    ) -> torch.Tensor:
        first: list[torch.Tensor] = []

        def recorder(index: int) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
            def on_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                hidden, call = _split(args, kwargs)
                if first and hidden is not first[0]:
                    raise SourceError(
                        f"{type(self.model).__name__} changes the hidden states between decoder layers {index - 1} and "
                        f"{index}; layer-by-layer streaming does not support this architecture"
                    )
                first.append(hidden)
                calls[index].append(interner.intern(call))
                if index == len(self.layers) - 1:
                    raise _Stop
                return _as_returned(hidden, returns)

            return on_call

        self._forward(tokens, recorder)
        return first[0]

    def _forward(self, tokens: torch.Tensor, on_call: Callable[[int], Callable[..., Any]]) -> Any:
        """The model's own forward with stand-ins for all decoder layers; None when a stand-in stopped it."""
        originals = list(self.layers)
        for index, layer in enumerate(originals):
            self.layers[index] = _StandIn(layer, on_call(index))
        try:
            return self.model(tokens.to(self.device), use_cache=False)
        except _Stop as stop:
            clear_frames(stop.__traceback__)  # they hold activations, in cycles that are collected much later
            return None
        finally:
            for index, layer in enumerate(originals):
                self.layers[index] = layer


@dataclass
class StreamedPass:
    """One set of sequences on its way through the layers.

    Attributes:
        tokens: int64 [samples, length].
        calls: per layer, per batch, the recorded arguments.
        hidden: float32 [samples, length, hidden] on the CPU, the input of the next layer to run.
    """

    owner: StreamedModel
    tokens: torch.Tensor
    calls: list[list[LayerCall]]
    hidden: torch.Tensor
    batch_size: int
    returns: int

    def batches(self, index: int) -> Iterator[tuple[LayerCall, torch.Tensor]]:
        """(call, hidden states on the device) for each batch of layer `index`."""
        for call, hidden in zip(self.calls[index], torch.split(self.hidden, self.batch_size), strict=True):
            yield call, hidden.to(self.owner.device)

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Replace `hidden` by layer `index`'s output; the layer must be loaded."""
        layer = self.owner.layers[index]
        for call, batch in zip(self.calls[index], torch.split(self.hidden, self.batch_size), strict=True):
            output = call.run(layer, batch.to(self.owner.device))
            batch.copy_(output[0] if isinstance(output, tuple | list) else output)  # a view into self.hidden

    @torch.no_grad()
    def run_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load, run and drop every layer in turn."""
        for index in range(len(self.owner.layers)):
            self.owner.load_layer(index)
            self.advance(index)
            self.owner.drop_layer(index)
            if progress is not None:
                progress(index + 1, len(self.owner.layers))

    @torch.no_grad()
    def logits(self, sample: int) -> torch.Tensor:
        """Float32 [length, vocab] of one sequence on the CPU, once `hidden` is the last layer's output."""
        return self.head(sample, self.hidden[sample : sample + 1].to(self.owner.device)).float().cpu()

    def head(self, sample: int, final: torch.Tensor) -> torch.Tensor:
        """Logits [length, vocab] of one sequence from the last layer's output [1, length, hidden], on its device.

        Differentiable in `final` where gradients are recorded.
        """
        self.owner.load_outer()

        def passthrough(index: int) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
            return lambda args, kwargs: _as_returned(final, self.returns)

        output = self.owner._forward(self.tokens[sample : sample + 1], passthrough)
        logits: torch.Tensor = output.logits[0]
        return logits


def _trim_heap() -> None:
    """Give freed memory back to the system, where the C library can (glibc): its heap would grow layer by layer,
    fragmented by tensors of many sizes, although nothing is held."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _to_meta(parameter: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, LayerCall]:
    """Take the hidden states out of a layer's arguments."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0], LayerCall((None, *args[1:]), dict(kwargs), 0)
    rest = dict(kwargs)
    hidden = rest.pop("hidden_states", None)
    if not isinstance(hidden, torch.Tensor):
        raise SourceError("a decoder layer is called without hidden states; this architecture is not supported")
    return hidden, LayerCall(args, rest, None)


def _as_returned(hidden: torch.Tensor, returns: int) -> Any:
    return (hidden, *([None] * (returns - 1))) if returns else hidden


class _Interner:
    """Keeps one copy of equal tensors: masks and rotary tables are the same for every batch and most layers."""

    def __init__(self) -> None:
        self.pool: list[torch.Tensor] = []

    def intern(self, call: LayerCall) -> LayerCall:
        return LayerCall(self._tree(call.args), self._tree(call.kwargs), call.position)

    def _tree(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) in (tuple, list):
            return type(value)(self._tree(item) for item in value)
        if type(value) is dict:
            return {key: self._tree(item) for key, item in value.items()}
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        for known in self.pool:
            if known is tensor or (
                known.shape == tensor.shape and known.dtype == tensor.dtype and torch.equal(known, tensor)
            ):
                return known
        self.pool.append(tensor)
        return tensor
