"""What writing and verifying need of quantized weights, whether a run made them or another checkpoint holds them."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from quantforge.formats import SiteShape
from quantforge.model.packed import Copied
from quantforge.quantized import CacheScales, QuantizedWeight
from quantforge.readers import DecodedWeight
from quantforge.spec import ActivationSpec, KvCacheSpec, QuantSpec


class Contents(Protocol):
    """A checkpoint in the making. Attributes:

    source: where side files and every tensor that is neither a site's nor changed nor unused are copied from.
    config: config.json, without ``quantization_config``.
    shapes: the sites by checkpoint name (without ``.weight``).
    specs: the grid of each.
    activations: the grid of the sites' inputs, None when they stay in floating point.
    packed: keys of `source` that hold a site, with its name (``<site>.weight``, or packed tensors). They are not
        copied; what the site is made of is written in the place of the first.
    changed: keys of `source` whose values are to be replaced by those of `tensor`.
    unused: keys of `source` that are not written: they only repeat another tensor, or are in `cache_scales`.
    kv_cache: the grid of cached keys and values, None when nothing is said of them.
    cache_scales: of each attention module that caches keys and values, by its name in the checkpoint.
    """

    @property
    def source(self) -> Copied: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def shapes(self) -> Mapping[str, SiteShape]: ...
    @property
    def specs(self) -> Mapping[str, QuantSpec]: ...
    @property
    def activations(self) -> ActivationSpec | None: ...
    @property
    def packed(self) -> Mapping[str, str]: ...
    @property
    def changed(self) -> frozenset[str]: ...
    @property
    def unused(self) -> frozenset[str]: ...
    @property
    def kv_cache(self) -> KvCacheSpec | None: ...
    @property
    def cache_scales(self) -> Mapping[str, CacheScales]: ...

    def weight(self, name: str) -> QuantizedWeight:
        """The codes, scales and zeros of one site, to be encoded."""

    def expected(self, name: str) -> QuantizedWeight | DecodedWeight:
        """What one site must read back as: the same codes, and bit for bit the same dequantized weights."""

    def tensor(self, key: str) -> torch.Tensor:
        """What replaces a changed tensor."""
