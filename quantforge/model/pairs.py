"""Which pairs a decoder layer has, found by scaling one parameter after another and looking at what follows."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor, nn

from quantforge.model.folds import SAME, Factor, Pair, fold, multiplied, powers_of_two, prove, replaced
from quantforge.model.streamed import LayerCall
from quantforge.model.traces import ModuleCall, Trace, distance, is_scaled, scaled_argument, tensors_in, trace_layer

HEAD_SIZES = range(8, 257)
MAX_COMBINATIONS = 64


@torch.no_grad()
def find_pairs(layer: nn.Module, call: LayerCall, hidden: Tensor) -> list[Pair]:
    """All pairs of a loaded layer, proven, in the order in which the producers run; each reader is in one pair.

    Args:
        call: the layer's own arguments for a few tokens, more than one in a sequence.
        hidden: [sequences, length, hidden], the layer's real inputs for them.
    """
    reference = trace_layer(layer, call, hidden)
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


def _producers(layer: nn.Module, name: str, calls: list[ModuleCall]) -> Iterator[tuple[Factor, tuple[str, ...]]]:
    """Parameters of a module that scale its output channels, with the biases that must be scaled along."""
    module = layer.get_submodule(name)
    if len(calls) != 1 or not isinstance(calls[0].output, Tensor):
        return
    count = calls[0].output.shape[-1]
    own = {leaf: parameter for leaf, parameter in module._parameters.items() if parameter is not None}
    scale = powers_of_two(count).to(calls[0].output.device)
    for leaf, parameter in own.items():
        biases = tuple(f"{name}.{other}" for other, p in own.items() if other != leaf and p.shape == (count,))
        for dim, offset in product(range(parameter.ndim), (0.0, 1.0)):
            if parameter.ndim > 2 or parameter.shape[dim] != count or (offset and parameter.ndim > 1):
                continue
            factor = Factor(name, leaf, dim, offset)
            pair = Pair(factor, biases, (), torch.arange(count))
            with replaced(layer, fold(layer, pair, scale, {}).tensors):
                output = calls[0].run(module)
            if is_scaled(calls[0].output, output, scale):
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
    reference: Trace,
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
    while True:
        with replaced(layer, changed):
            trace = trace_layer(
                layer, call, hidden, {name: (key, factor[channels]) for name, (key, channels) in readers.items()}
            )
        new = {}
        for name, calls in trace.calls.items():
            around = any(reader.startswith(f"{name}.") for reader in readers)
            if name in readers or name == producer.module or around or not _has_matrix(layer.get_submodule(name)):
                continue
            if (read := _reading(reference.calls.get(name, []), calls, factor, selected)) is not None:
                new[name] = read
        if not new:
            break
        inner = {name for name in new if not any(other.startswith(f"{name}.") for other in new)}  # what really reads
        readers |= {name: read for name, read in new.items() if name in inner}
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


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter is not None and parameter.ndim >= 2 for parameter in module._parameters.values())


def _reading(
    reference: list[ModuleCall], calls: list[ModuleCall], factor: Tensor, selected: Tensor
) -> tuple[int | str, Tensor] | None:
    """(argument, channel of each column) when a module's input scaled with the producer in exactly one way."""
    widths = {tensor.shape[-1] for one in reference[:1] for tensor in one.tensors().values() if tensor.ndim}
    found = [
        (key, channels)
        for width in sorted(widths)
        for channels in _columns_fed(selected, width)
        if (key := scaled_argument(reference, calls, factor[channels])) is not None
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
    layer: nn.Module, name: str, calls: list[ModuleCall], key: int | str, in_features: int
) -> list[Factor] | None:
    """The parameters of a module that must be scaled, and along which dim, when one of its arguments is divided."""
    module = layer.get_submodule(name)
    scale = powers_of_two(in_features).to(calls[0].tensors()[key].device)
    options = []
    for leaf, parameter in module._parameters.items():
        if parameter is not None and parameter.ndim >= 2:
            dims = [dim for dim in reversed(range(parameter.ndim)) if parameter.shape[dim] == in_features]
            options.append([*(Factor(name, leaf, dim) for dim in dims), None])
    combinations = [[one for one in chosen if one is not None] for chosen in product(*options)]
    for factors in sorted(combinations[:MAX_COMBINATIONS], key=len):
        tensors = {read.name: multiplied(layer.get_parameter(read.name).data, scale, read.dim) for read in factors}
        with replaced(layer, tensors):
            outputs = [list(tensors_in(call.scaled(key, 1 / scale).run(module))) for call in calls]
        expected = [list(tensors_in(call.output)) for call in calls]
        if all(distance(a, b)[0] <= SAME for a, b in zip(expected, outputs, strict=True)):
            return factors or None
    return None
