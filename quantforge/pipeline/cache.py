"""Scales for a cache of keys and values: what a plan must know of them, and those of one layer."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quantforge.errors import QuantforgeError
from quantforge.formats import Format
from quantforge.model.kv_cache import cache_takers, checkpoint_name, observe_cache, rounded_cache
from quantforge.model.streamed import StreamedModel, StreamedPass
from quantforge.numerics.activations import cache_scale
from quantforge.pipeline.serving import caching_layers, is_latent, kv_heads
from quantforge.quantized import CacheScales
from quantforge.recipe import Recipe
from quantforge.report import CacheReport
from quantforge.spec import KvCacheSpec

NONE = "--kv-cache none leaves the cache as it is"


@dataclass(frozen=True, eq=False)
class CalibratedCache:
    """What one layer caches.

    Attributes:
        scales: by attention module, as the checkpoint calls it; `paths` has the same by module path.
    """

    scales: Mapping[str, CacheScales] = field(default_factory=dict)
    paths: Mapping[str, CacheScales] = field(default_factory=dict)
    reports: tuple[CacheReport, ...] = ()
    warnings: tuple[str, ...] = ()


def cache_problems(recipe: Recipe, streamed: StreamedModel, formats: Iterable[Format]) -> Iterator[str]:
    """What forbids scales of a cache, as far as config and modules tell."""
    if recipe.kv_cache == "none":
        return
    for target in formats:
        if target.encode_cache is None:
            yield f"--format {target.name} cannot hold scales of a cache (--kv-cache); use compressed-tensors"
    config = streamed.text_config
    if is_latent(config):
        yield f"latent attention caches a compressed latent, and not the keys and values that --kv-cache is for; {NONE}"
    elif not (caching := caching_layers(config)):
        yield f"no layer of this model caches keys and values, as far as its config tells; {NONE}"
    elif not cache_takers(streamed.layers[caching[0]], f"{streamed.layout.stack}.{caching[0]}"):
        yield f"no module of layer {caching[0]} is given a cache, so that nothing can be observed; {NONE}"
    if recipe.sequential == "none":
        yield (
            "--kv-cache takes its scales from what quantized layers cache, which --sequential none never runs; use "
            "--sequential layer or group"
        )
    if recipe.tune_epochs:
        yield (
            "--tune-epochs changes weights after the scales of the cache were taken from what they give; use "
            "--tune-epochs 0 with --kv-cache"
        )


def scale_bytes(config: Any, spec: KvCacheSpec | None) -> int:
    """Bytes of all scales: two of 16 bits a layer that caches, or two a head."""
    return 0 if spec is None else 2 * 2 * len(caching_layers(config)) * (kv_heads(config) if spec.per_head else 1)


def calibrate_cache(run: StreamedPass, index: int, spec: KvCacheSpec) -> CalibratedCache:
    """Scales for what layer `index`, loaded and quantized, caches of its input.

    QuantforgeError when a layer that should cache keys and values by its config does not.
    """
    ranges = observe_cache(run, index)
    if not ranges and index in caching_layers(run.owner.text_config):
        raise QuantforgeError(f"layer {index} should cache keys and values by its config, and caches none; {NONE}")
    scales, paths, reports, warnings = {}, {}, [], []
    for one in ranges:
        name = checkpoint_name(run.owner, one.module)
        own = CacheScales(cache_scale(one.k, spec), cache_scale(one.v, spec))
        scales[name] = paths[one.module] = own
        numbers = [tuple(map(float, tensor)) for tensor in (one.k, one.v, own.k, own.v)]
        reports.append(CacheReport(name, one.tokens, *numbers))
        for what, largest in (("keys", one.k), ("values", one.v)):
            if dead := int((largest == 0).sum()):
                warnings.append(f"{name}: {what} of {dead} of {len(largest)} heads were 0 for all calibration tokens")
    return CalibratedCache(scales, paths, tuple(reports), tuple(warnings))


@contextmanager
def calibrated(
    run: StreamedPass, index: int, cache: CalibratedCache | None, spec: KvCacheSpec | None
) -> Iterator[None]:
    """While this is open, layer `index` goes on with keys and values as its cache gives them back, if it has one."""
    if cache is None or spec is None:
        yield
        return
    takers = cache_takers(run.owner.layers[index], f"{run.owner.layout.stack}.{index}")
    with rounded_cache({path: takers[path] for path in cache.paths}, cache.paths, spec):
        yield
