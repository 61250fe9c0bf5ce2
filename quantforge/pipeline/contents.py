"""What writing and verifying need of quantized weights, whether a run made them or another checkpoint holds them."""

from collections.abc import Mapping
from typing import Protocol

import torch

from quantforge.formats import SiteShape
from quantforge.model.source import Checkpoint
from quantforge.quantized import QuantizedWeight
from quantforge.spec import ActivationSpec, QuantSpec


class Contents(Protocol):
    """A checkpoint in the making.

    Attributes:
        source: where config, side files and every tensor that is neither a site nor changed are copied from.
        shapes: the sites by checkpoint name (without ``.weight``), in the order in which they are written.
        specs: the grid of each.
        activations: the grid of the sites' inputs, None when they stay in floating point.
        packed: keys of `source` that belong to sites and are not copied (``<site>.weight``, or packed tensors).
        changed: keys of `source` whose values are to be replaced by those of `tensor`.
    """

    source: Checkpoint
    shapes: Mapping[str, SiteShape]
    specs: Mapping[str, QuantSpec]
    activations: ActivationSpec | None
    packed: frozenset[str]
    changed: frozenset[str]

    def weight(self, name: str) -> QuantizedWeight:
        """The codes, scales and zeros of one site."""

    def tensor(self, key: str) -> torch.Tensor:
        """What replaces a changed tensor."""
