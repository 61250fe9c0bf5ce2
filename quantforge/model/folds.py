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

import torch
from torch import Tensor, nn

from quantforge.model.streamed import LayerCall
from quantforge.model.traces import distance, scaled_argument, trace_layer

SAME = 1e-5
"""Two results are the same when no token differs by more than this share of its norm."""

UNCOMPENSATED = 1e-3
"""... and when the difference is at most this share of what the producer's change alone does to the layer."""


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
        tensors = {pair.producer.name: multiplied(parameter, 1 / factor, pair.producer.dim)}
    for name in pair.biases:
        tensors[name] = multiplied(layer.get_parameter(name).data, 1 / factor, 0)
    exact = factor[channels]
    for read in pair.reads:
        tensors[read.name] = multiplied(layer.get_parameter(read.name).data, exact, read.dim)
    for name in tensors.keys() & stored.keys():
        tensors[name] = tensors[name].to(stored[name]).to(tensors[name].dtype)
    return Fold(tensors, exact.to(scale.dtype))


def multiplied(tensor: Tensor, factor: Tensor, dim: int) -> Tensor:
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


# ------------------------------------------------------------------------------------------------ proof


def powers_of_two(count: int) -> Tensor:
    return 2.0 ** torch.randint(-2, 3, (count,), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def prove(layer: nn.Module, call: LayerCall, hidden: Tensor, pair: Pair) -> str | None:
    """Fold random powers of two and replay the layer; None when nothing that leaves it changed, else what did.

    The inputs of everything that reads the producer must have been divided, and without the readers' compensation
    the layer's output must have changed a great deal more: otherwise the test would prove nothing.
    """
    count = layer.get_parameter(pair.producer.name).shape[pair.producer.dim]
    folded = fold(layer, pair, powers_of_two(count).to(hidden.device)[pair.channels.to(hidden.device)], {})
    produced = {name: folded.tensors[name] for name in (pair.producer.name, *pair.biases)}
    reference = trace_layer(layer, call, hidden)
    with replaced(layer, produced):
        control = trace_layer(layer, call, hidden)
    with replaced(layer, folded.tensors):
        proof = trace_layer(layer, call, hidden)
    for name in pair.consumers:
        if scaled_argument(reference.calls.get(name, []), proof.calls.get(name, []), folded.scale) is None:
            return f"the input of {name} is not what {pair.producer.module} was scaled to"
    worst, total = distance(reference.result, proof.result)
    _, uncompensated = distance(reference.result, control.result)
    if worst > SAME or total > UNCOMPENSATED * uncompensated:
        return f"the layer's output changes by {worst:.1e} when {pair.producer.module} is folded"
    return "the layer's output does not depend on it" if uncompensated == 0 else None
