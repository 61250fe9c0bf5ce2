"""Transforms: which scale to move between a producer and its consumers so that rounding costs less.

One file a transform; the file's ``TRANSFORM`` is the registry entry. A transform sees tensors only: where scales can
move is found by `model.folds`, and whether one that was found helps the layer is measured by `pipeline.transform`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from quantforge.errors import UsageError
from quantforge.numerics.grid import importance_of, nearest_on_grid
from quantforge.numerics.metrics import proxy_loss
from quantforge.registry import load, names_in
from quantforge.spec import ActivationSpec, QuantSpec

LARGEST_SCALE = 2.0**10


@dataclass(frozen=True, eq=False)
class Consumer:
    """Sites that read the producer, share an input and a grid, and are stacked along rows.

    Attributes:
        name: for messages.
        weight: [out, in], float32 or float64.
        spec: the grid.
        gram: mean outer product of the inputs, [in, in], same dtype.
    """

    name: str
    weight: Tensor
    spec: QuantSpec
    gram: Tensor


@dataclass(frozen=True, eq=False)
class FoldProblem:
    """One pair: what scale [in] should its consumers' columns be multiplied by, and the producer divided by?

    Attributes:
        name: producer and consumers, for messages.
        consumers: one or more; all have the same inputs in the same order.
        channels: int64 [in], the producer's channel of each column; columns of one channel must share a scale.
        mean_abs, abs_max: [in], mean and largest magnitude of each input.
        rows: [n, in], a sample of the inputs, when the transform asks for one (`needs_rows`).
        row_weights: [n], how much each of them counts; None when all count alike.
        searched: whether the weights will be rounded on searched grids, not min-max ones.
        activations: the grid of the inputs, None when they stay in floating point.
        powers_of_two: whether the scale must be powers of two, because something it changes is stored in 16 bits.
    """

    name: str
    consumers: tuple[Consumer, ...]
    channels: Tensor
    mean_abs: Tensor
    abs_max: Tensor
    rows: Tensor | None = None
    row_weights: Tensor | None = None
    searched: bool = False
    activations: ActivationSpec | None = None
    powers_of_two: bool = False

    @cached_property
    def energy(self) -> float:
        """Mean square of the consumers' outputs, ``tr(W H W^T)`` over all of them."""
        return sum(float(((one.weight @ one.gram) * one.weight).sum()) for one in self.consumers)


@dataclass(frozen=True, eq=False)
class FoldSolution:
    """The best scale that was tried, all ones when none is better than none.

    Attributes:
        scale: [in], positive.
        alpha: the exponent it was made with; 0 for none.
        rule: how, in a word.
        before, after: expected output error of the consumers, relative to their outputs' energy, without and with it.
    """

    scale: Tensor
    alpha: float
    rule: str
    before: float
    after: float


@dataclass(frozen=True)
class Transform:
    """A way to choose scales. `solve` is pure.

    Attributes:
        quantizes_inputs: it is about rounding activations too, and makes no sense where they stay in floating point.
        needs_rows: it needs `FoldProblem.rows`.
        solver, solver_options: what ``--method NAME`` alone stands for.
    """

    name: str
    summary: str
    solve: Callable[[FoldProblem], FoldSolution]
    quantizes_inputs: bool = False
    needs_rows: bool = False
    solver: str = "rtn"
    solver_options: Mapping[str, bool | int | float | str] = field(default_factory=dict)


def transform_names() -> list[str]:
    """Names of all transforms, from the files of this folder."""
    return names_in(__path__)


def load_transform(name: str) -> Transform:
    """Import one transform by name; raises UsageError naming the known ones."""
    return load(__name__, __path__, name, "TRANSFORM", Transform, UsageError)


# ------------------------------------------------------------------------------------------------ shared by transforms


def tied_mean(values: Tensor, channels: Tensor) -> Tensor:
    """Each column's value [in] replaced by the mean over the columns of its channel."""
    count = int(channels.max()) + 1
    total = torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, channels, values)
    columns = torch.bincount(channels, minlength=count).clamp(min=1)
    return (total / columns)[channels]


def tied_max(values: Tensor, channels: Tensor) -> Tensor:
    """Each column's value [in], not negative, replaced by the largest of the columns of its channel."""
    count = int(channels.max()) + 1
    largest = torch.zeros(count, dtype=values.dtype, device=values.device)
    return largest.scatter_reduce_(0, channels, values, "amax")[channels]


def tidy_scale(scale: Tensor, powers_of_two: bool) -> Tensor:
    """A scale [in] with the geometric middle of its extremes at 1, and bounded; 1 where it is not a positive number."""
    sound = torch.isfinite(scale) & (scale > 0)
    if not bool(sound.any()):
        return torch.ones_like(scale)
    low, high = scale[sound].aminmax()
    scale = (scale / (low.sqrt() * high.sqrt())).masked_fill(~sound, 1.0).clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
    return 2.0 ** scale.log2().round() if powers_of_two else scale


def rounding_error(problem: FoldProblem, scale: Tensor, max_rows: int | None = None) -> float:
    """Expected output error when the scaled weights are rounded to nearest, relative to the outputs' energy.

    Exactly ``tr(E H E^T) / tr(W H W^T)`` with ``E = W - Q(W s) / s``, H the gram of the inputs before scaling: what the
    consumers' outputs are off by, mean square over the inputs that H was gathered from.

    Args:
        scale: s, [in].
        max_rows: of each consumer, look at this many rows only, evenly spread.
    """
    error = 0.0
    for consumer in problem.consumers:
        weight = _spread(consumer.weight, max_rows)
        importance = importance_of(consumer.gram.diagonal() / scale.square()) if problem.searched else None
        rounded = nearest_on_grid(weight * scale, consumer.spec, importance).dequantize().to(weight.dtype) / scale
        weighed = consumer.weight.shape[0] / weight.shape[0]
        error += weighed * float(proxy_loss(weight, rounded, consumer.gram).sum())
    return error / problem.energy if problem.energy else 0.0


def _spread(weight: Tensor, max_rows: int | None) -> Tensor:
    """At most `max_rows` rows, evenly spread."""
    count = weight.shape[0]
    if max_rows is None or count <= max_rows:
        return weight
    return weight[torch.arange(max_rows, device=weight.device) * count // max_rows]
