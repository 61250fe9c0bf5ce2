"""Where a scale per channel can move inside a decoder layer without changing what the layer computes.

A pair is a producer, whose output channels are divided, and everything that reads them, whose input columns are
multiplied (SmoothQuant, arXiv 2211.10438; AWQ, arXiv 2306.00978). No architecture is named: what a parameter does is
found by scaling it and looking at what comes out of its module; what reads a producer is found by scaling the producer
and looking for inputs that scale with it, channel by channel; and a pair counts only when the whole layer's output
stays the same. Scales that are powers of two change no rounding, so "the same" is tested far below float32 noise.

Parameters are named relative to the layer, ``self_attn.v_proj.weight``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from quantforge.model.streamed import LayerCall

SAME = 1e-5
"""Two results are the same when no token differs by more than this share of its norm."""

UNCOMPENSATED = 1e-3
"""... and when the difference is at most this share of what the producer's change alone does to the layer."""

SCALED = 1e-4
HEAD_SIZES = range(8, 257)
MAX_COMBINATIONS = 64


@dataclass(frozen=True)
class Factor:
    """A parameter that scales its module's output channels, or its input columns, along `dim`.

    `offset` is what is added to the parameter before it multiplies: 1 for norms whose gain is ``1 + weight``.
    """

    module: str
    leaf: str
    dim: int
    offset: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.module}.{self.leaf}"


@dataclass(frozen=True, eq=False)
class Pair:
    """A producer and everything that reads it.

    Attributes:
        producer: what is divided; `biases` are the names of parameters that are added after it and divided too.
        reads: what is multiplied, one or more parameters.
        channels: int64 [in], the producer's output channel that feeds each input column of the readers (a channel of
            v feeds several of o when query heads share it).
    """

    producer: Factor
    biases: tuple[str, ...]
    reads: tuple[Factor, ...]
    channels: Tensor

    @property
    def in_features(self) -> int:
        return len(self.channels)

    @property
    def consumers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(read.module for read in self.reads))

    @property
    def exact_gain(self) -> bool:
        """True when the gain is the parameter itself, so that dividing it by a power of two rounds nothing."""
        return self.producer.offset == 0

    @property
    def names(self) -> tuple[str, ...]:
        """Every parameter that a fold changes."""
        return (self.producer.name, *self.biases, *(read.name for read in self.reads))


@dataclass(frozen=True, eq=False)
class Fold:
    """New parameters by name, and the scale [in] that they amount to, after the rounding of what is stored."""

    tensors: dict[str, Tensor]
    scale: Tensor


# ------------------------------------------------------------------------------------------------ folding


@torch.no_grad()
def fold(layer: nn.Module, pair: Pair, scale: Tensor, stored: Mapping[str, torch.dtype]) -> Fold:
    """Divide the producer by `scale` and multiply what reads it; the layer itself is not changed.

    Args:
        scale: float [in], positive; columns fed by one channel must agree.
        stored: parameters that stay in floating point, with the dtype they are stored in: they are rounded to it. A
            producer with one value a channel (a norm) is rounded first, and the scale is then what the rounded values
            amount to, so that the fold stays exact. A channel whose gain is 0, or would become 0 or infinite, keeps
            a scale of 1.
    """
    channels = pair.channels.to(scale.device)
    parameter = layer.get_parameter(pair.producer.name).data
    factor = torch.ones(parameter.shape[pair.producer.dim], device=scale.device, dtype=torch.float64)
    factor[channels] = scale.double()
    if parameter.ndim == 1:
        gain = parameter.double() + pair.producer.offset
        stored_as = stored.get(pair.producer.name, torch.float32)
        new = (gain / factor - pair.producer.offset).to(stored_as).double()
        new_gain = new + pair.producer.offset
        sound = (gain != 0) & (new_gain != 0) & torch.isfinite(new_gain)
        tensors = {pair.producer.name: torch.where(sound, new, parameter.double()).to(parameter.dtype)}
        factor = torch.where(sound, gain / new_gain, 1.0)
    else:
        tensors = {pair.producer.name: _along(parameter, 1 / factor, pair.producer.dim)}
    for name in pair.biases:
        tensors[name] = _along(layer.get_parameter(name).data, 1 / factor, 0)
    exact = factor[channels]
    for read in pair.reads:
        tensors[read.name] = _along(layer.get_parameter(read.name).data, exact, read.dim)
    for name in tensors.keys() & stored.keys():
        tensors[name] = tensors[name].to(stored[name]).to(tensors[name].dtype)
    return Fold(tensors, exact.to(scale.dtype))


def _along(tensor: Tensor, factor: Tensor, dim: int) -> Tensor:
    """`tensor` times `factor` along one dim, in the tensor's dtype."""
    shape = [-1 if d == dim % tensor.ndim else 1 for d in range(tensor.ndim)]
    return tensor * factor.to(tensor.dtype).reshape(shape)


@contextmanager
def replaced(layer: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The layer with other values for some parameters, for a while."""
    kept = {name: layer.get_parameter(name).data for name in tensors}
    try:
        for name, tensor in tensors.items():
            layer.get_parameter(name).data = tensor
        yield
    finally:
        for name, tensor in kept.items():
            layer.get_parameter(name).data = tensor


# ------------------------------------------------------------------------------------------------ traces


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of one module: its arguments, tensors copied, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def tensors(self) -> dict[int | str, Tensor]:
        """The floating point arguments by place or keyword."""
        found = {**dict(enumerate(self.args)), **self.kwargs}
        return {key: value for key, value in found.items() if isinstance(value, Tensor) and value.is_floating_point()}

    def run(self, module: nn.Module) -> Any:
        return module(*self.args, **self.kwargs)

    def scaled(self, key: int | str, factor: Tensor) -> "_Call":
        """The same call with one argument's channels multiplied."""
        return _Call(*_multiplied(self.args, self.kwargs, key, factor), self.output)


@dataclass(frozen=True, eq=False)
class _Trace:
    """The calls of every module that has parameters of its own, and all tensors that leave the layer."""

    calls: dict[str, list[_Call]]
    result: list[Tensor]


def _multiplied(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, factor: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(key, str):
        return args, kwargs | {key: kwargs[key] * factor.to(kwargs[key].dtype)}
    return (*args[:key], args[key] * factor.to(args[key].dtype), *args[key + 1 :]), kwargs


def _trace(
    layer: nn.Module,
    call: LayerCall,
    hidden: Tensor,
    compensate: Mapping[str, tuple[int | str, Tensor]] | None = None,
) -> _Trace:
    """Replay a layer; `compensate` multiplies an argument of some modules, after it was recorded."""
    calls: dict[str, list[_Call]] = {}
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
            calls.setdefault(name, []).append(_Call(*started.pop(), _copied(output)))

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
    return _Trace(calls, list(_tensors((output, call.args, call.kwargs))))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _distance(reference: list[Tensor], other: list[Tensor]) -> tuple[float, float]:
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


# ------------------------------------------------------------------------------------------------ proof


def _powers_of_two(count: int) -> Tensor:
    return 2.0 ** torch.randint(-2, 3, (count,), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def prove(layer: nn.Module, call: LayerCall, hidden: Tensor, pair: Pair) -> str | None:
    """Fold random powers of two and replay the layer; None when nothing that leaves it changed, else what did.

    The inputs of everything that reads the producer must have been divided, and without the readers' compensation
    the layer's output must have changed a great deal more: otherwise the test would prove nothing.
    """
    count = layer.get_parameter(pair.producer.name).shape[pair.producer.dim]
    folded = fold(layer, pair, _powers_of_two(count).to(hidden.device)[pair.channels.to(hidden.device)], {})
    produced = {name: folded.tensors[name] for name in (pair.producer.name, *pair.biases)}
    reference = _trace(layer, call, hidden)
    with replaced(layer, produced):
        control = _trace(layer, call, hidden)
    with replaced(layer, folded.tensors):
        proof = _trace(layer, call, hidden)
    for name in pair.consumers:
        if _scaled_argument(reference.calls.get(name, []), proof.calls.get(name, []), folded.scale) is None:
            return f"the input of {name} is not what {pair.producer.module} was scaled to"
    worst, total = _distance(reference.result, proof.result)
    _, uncompensated = _distance(reference.result, control.result)
    if worst > SAME or total > UNCOMPENSATED * uncompensated:
        return f"the layer's output changes by {worst:.1e} when {pair.producer.module} is folded"
    return "the layer's output does not depend on it" if uncompensated == 0 else None


def _scaled_argument(reference: list[_Call], other: list[_Call], scale: Tensor) -> int | str | None:
    """Which argument of a module is, in `other`, its value in `reference` divided by `scale`; None when none is."""
    if not reference or len(reference) != len(other):
        return None
    for key in reference[0].tensors():
        pairs = [(a.tensors().get(key), b.tensors().get(key)) for a, b in zip(reference, other, strict=True)]
        if all(a is not None and b is not None and _is_scaled(a, b, scale) for a, b in pairs):
            return key
    return None


def _is_scaled(reference: Tensor, other: Tensor, scale: Tensor) -> bool:
    """True when every column of `other` is that of `reference` divided by its scale."""
    if reference.shape != other.shape or not reference.ndim or reference.shape[-1] != len(scale):
        return False
    a, b = (tensor.reshape(-1, len(scale)).double() for tensor in (reference, other))  # [tokens, channels]
    norms = a.norm(dim=0)
    apart = (b * scale.double() - a).norm(dim=0)
    return bool((apart <= SCALED * norms + 1e-2 * SCALED * norms.max()).all()) and float(norms.max()) > 0


# ------------------------------------------------------------------------------------------------ search


@torch.no_grad()
def find_pairs(layer: nn.Module, call: LayerCall, hidden: Tensor) -> list[Pair]:
    """All pairs of a loaded layer, proven, in the order in which the producers run; each reader is in one pair.

    Args:
        call: the layer's own arguments for a few tokens, more than one in a sequence.
        hidden: [sequences, length, hidden], the layer's real inputs for them.
    """
    reference = _trace(layer, call, hidden)
    widths = {
        tensor.shape[-1]
        for calls in reference.calls.values()
        for tensor in calls[0].tensors().values()
        if tensor.ndim >= 2
    }
    found: list[Pair] = []
    taken: set[str] = set()
    for module in reference.calls:
        for producer, biases in _producers(layer, module, reference.calls[module]):
            count = layer.get_parameter(producer.name).shape[producer.dim]
            for selected in _parts(count, widths) if layer.get_parameter(producer.name).ndim > 1 else [range(count)]:
                pair = _pair(layer, call, hidden, reference, producer, biases, torch.tensor(selected))
                if pair is None or taken & {read.name for read in pair.reads}:
                    continue
                if prove(layer, call, hidden, pair) is None:
                    found.append(pair)
                    taken |= {read.name for read in pair.reads}
    return found


def _producers(layer: nn.Module, name: str, calls: list[_Call]) -> Iterator[tuple[Factor, tuple[str, ...]]]:
    """Parameters of a module that scale its output channels, with the biases that must be scaled along."""
    module = layer.get_submodule(name)
    if len(calls) != 1 or not isinstance(calls[0].output, Tensor):
        return
    count = calls[0].output.shape[-1]
    own = {leaf: parameter for leaf, parameter in module._parameters.items() if parameter is not None}
    scale = _powers_of_two(count).to(calls[0].output.device)
    for leaf, parameter in own.items():
        biases = tuple(f"{name}.{other}" for other, p in own.items() if other != leaf and p.shape == (count,))
        for dim, offset in product(range(parameter.ndim), (0.0, 1.0)):
            if parameter.ndim > 2 or parameter.shape[dim] != count or (offset and parameter.ndim > 1):
                continue
            factor = Factor(name, leaf, dim, offset)
            pair = Pair(factor, biases, (), torch.arange(count))
            with replaced(layer, fold(layer, pair, scale, {}).tensors):
                output = calls[0].run(module)
            if _is_scaled(calls[0].output, output, scale):
                yield factor, biases
                return


def _parts(count: int, widths: set[int]) -> Iterator[range | list[int]]:
    """Which output channels of a matrix may be one producer: all, or the last of several matrices fused into one."""
    yield range(count)
    for width in sorted(width for width in widths if width < count):
        rest = count - width  # keys and values of grouped heads, behind queries of this width
        if 2 * width == count:
            yield range(width)
        if 2 * width <= count:
            yield range(rest, count)
        if rest % 2 == 0 and 0 < rest // 2 < width and width % (rest // 2) == 0:
            yield range(count - rest // 2, count)
        if count == 3 * width:  # queries, keys and values of one head after the other
            for size in HEAD_SIZES:
                if width % size == 0 and size < width:
                    yield [head + i for head in range(2 * size, count, 3 * size) for i in range(size)]


def _pair(
    layer: nn.Module,
    call: LayerCall,
    hidden: Tensor,
    reference: _Trace,
    producer: Factor,
    biases: tuple[str, ...],
    selected: Tensor,
) -> Pair | None:
    """The pair of one producer, not yet proven: scale it, and see whose inputs scale with it.

    Readers that are found are compensated and the layer is replayed, until no more are found: what a router sends
    to its experts is only seen once the router itself is undisturbed.
    """
    count = layer.get_parameter(producer.name).shape[producer.dim]
    order = torch.randperm(len(selected), generator=torch.Generator().manual_seed(len(selected)))
    factor = torch.ones(count)
    factor[selected] = 2 ** (2 * (order + 1) / (len(order) + 1) - 1)  # all different, 0.5 to 2
    factor = factor.to(hidden.device)
    unread = Pair(producer, biases, (), torch.arange(count))
    changed = fold(layer, unread, factor, {}).tensors
    readers: dict[str, tuple[int | str, Tensor]] = {}
    channels: Tensor | None = None
    while True:
        with replaced(layer, changed):
            trace = _trace(layer, call, hidden, {name: (key, factor[channels]) for name, (key, channels) in readers.items()})
        new = {}
        for name, calls in trace.calls.items():
            if name in readers or name == producer.module:
                continue
            if (read := _reading(reference.calls.get(name, []), calls, factor, selected)) is not None:
                new[name] = read
        if not new:
            break
        readers |= new
    if not readers:
        return None
    channels = next(iter(readers.values()))[1]
    if any(not torch.equal(channels, other) for _, other in readers.values()):
        return None
    reads: list[Factor] = []
    for name, (key, _) in readers.items():
        factors = _columns(layer, name, reference.calls[name], key, len(channels))
        if factors is None:
            return None
        reads += factors
    return Pair(producer, biases, tuple(reads), channels)


def _reading(
    reference: list[_Call], calls: list[_Call], factor: Tensor, selected: Tensor
) -> tuple[int | str, Tensor] | None:
    """(argument, channel of each column) when a module's input scaled with the producer in exactly one way."""
    widths = {tensor.shape[-1] for one in reference[:1] for tensor in one.tensors().values() if tensor.ndim}
    found = [
        (key, channels)
        for width in sorted(widths)
        for channels in _columns_fed(selected, width)
        if (key := _scaled_argument(reference, calls, factor[channels])) is not None
    ]
    return found[0] if len(found) == 1 else None


def _columns_fed(selected: Tensor, width: int) -> Iterator[Tensor]:
    """The channel of each of `width` columns: one each, or a run of channels (a head) repeated for several heads."""
    count = len(selected)
    if count == width:
        yield selected
    elif width % count == 0:
        for size in range(1, count + 1):
            if count % size == 0:
                yield selected.reshape(-1, size).repeat_interleave(width // count, 0).flatten()


def _columns(
    layer: nn.Module, name: str, calls: list[_Call], key: int | str, in_features: int
) -> list[Factor] | None:
    """The parameters of a module that must be scaled, and along which dim, when one of its arguments is divided."""
    module = layer.get_submodule(name)
    scale = _powers_of_two(in_features).to(calls[0].tensors()[key].device)
    options = []
    for leaf, parameter in module._parameters.items():
        if parameter is not None and parameter.ndim >= 2:
            dims = [dim for dim in reversed(range(parameter.ndim)) if parameter.shape[dim] == in_features]
            options.append([*(Factor(name, leaf, dim) for dim in dims), None])
    combinations = [[one for one in chosen if one is not None] for chosen in product(*options)]
    for factors in sorted(combinations[:MAX_COMBINATIONS], key=len):
        tensors = {read.name: _along(layer.get_parameter(read.name).data, scale, read.dim) for read in factors}
        with replaced(layer, tensors):
            outputs = [list(_tensors(call.scaled(key, 1 / scale).run(module))) for call in calls]
        expected = [list(_tensors(call.output)) for call in calls]
        if all(_distance(a, b)[0] <= SAME for a, b in zip(expected, outputs, strict=True)):
            return factors or None
    return None
