"""What will come of a recipe: sizes, memory, time, and what each server makes of the result."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantforge.contracts import Verdict, all_verdicts
from quantforge.model.outline import CONFIG, is_outline, outline_model
from quantforge.model.source import Checkpoint
from quantforge.pipeline.estimate import MEMORY_ASSUMES, TIME_ASSUMES, Estimate, estimate
from quantforge.pipeline.plan import Plan, choose_device, make_plan
from quantforge.pipeline.serving import LayerCache, cache_bytes, layer_caches
from quantforge.pipeline.subject import planned_subject
from quantforge.recipe import Recipe
from quantforge.spec import KvCacheSpec

DEFAULT_KV_BITS = 16


@dataclass(frozen=True)
class Load:
    """How the model will be served: `kv_bits` are those of a number in the cache, None for 16 or an export's own."""

    context: int = 8192
    batch: int = 8
    kv_bits: int | None = None
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Variant:
    """One thing to serve: the model as it is, or an export.

    Attributes:
        name: the format, or ``as it is``; with a budget, its bits too.
        total_bytes: of all tensors.
        stored_bits: bits of a quantized weight, everything that is stored for it counted; None when nothing is.
        weight_bytes: of the weights on each device.
        kv_bits: of a number in its cache; `kv_bytes` are those of keys and values (and states) on each device.
        verdicts: what each server does with it.
    """

    name: str
    total_bytes: int
    stored_bits: float | None
    weight_bytes: int
    kv_bits: int
    kv_bytes: int
    verdicts: tuple[Verdict, ...]

    @property
    def serving_bytes(self) -> int:
        """Weights and cache on each device."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, eq=False)
class Outlook:
    """Everything that `plan` tells.

    Attributes:
        outline: no weights were there; shapes come from the config.
        variants: the model as it is, then each export.
        caches: what the layers keep on each device.
    """

    plan: Plan
    load: Load
    outline: bool
    variants: tuple[Variant, ...]
    caches: tuple[LayerCache, ...]
    estimate: Estimate

    @property
    def kv_bytes(self) -> int:
        """Of keys and values (and states) of an export, on each device."""
        return self.variants[-1].kv_bytes

    @property
    def uncounted(self) -> tuple[LayerCache, ...]:
        """Layers whose memory could not be counted."""
        return tuple(cache for cache in self.caches if not cache.counted)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.plan.streamed.model.parameters())

    def to_json(self) -> dict[str, Any]:
        """The plan, and what it leads to; `plan` is that of `quantize --dry-run --json`."""
        what, peak_bytes = self.estimate.peak
        return {
            "plan": self.plan.to_json(),
            "parameters": self.parameters,
            "config_only": self.outline,
            "load": asdict(self.load) | {"kv_bits": self.variants[-1].kv_bits},
            "kv_bytes": self.kv_bytes,
            "caches": [asdict(cache) for cache in self.caches],
            "exports": [
                {
                    "name": variant.name,
                    "total_bytes": variant.total_bytes,
                    "bits_per_weight": variant.stored_bits,
                    "weight_bytes_per_device": variant.weight_bytes,
                    "kv_bits": variant.kv_bits,
                    "serving_bytes_per_device": variant.serving_bytes,
                    "servers": [asdict(verdict) | {"loads": verdict.loads} for verdict in variant.verdicts],
                }
                for variant in self.variants
            ],
            "quantizing": {
                "peak_bytes": peak_bytes,
                "peak_stage": what,
                "stages": dict(self.estimate.stages),
                "memory_assumes": MEMORY_ASSUMES,
                "operations": self.estimate.operations,
                "time_assumes": TIME_ASSUMES,
            },
        }


def look_ahead(recipe: Recipe, load: Load) -> tuple[Recipe, Outlook]:
    """The outlook of a recipe, whose `model` may be a config.json; PlanError with every problem found.

    Reads config.json and tensor headers, no weights. Returns the recipe too, its model a directory or hub id.
    """
    streamed = outline_model(
        recipe.model,
        choose_device(recipe.device),
        trust_remote_code=recipe.trust_remote_code,
        allow_pickle=recipe.allow_pickle,
    )
    if Path(recipe.model).name == CONFIG and Path(recipe.model).is_file():
        recipe = recipe.model_copy(update={"model": str(Path(recipe.model).parent)})
    plan = make_plan(recipe, streamed, elsewhere=True)
    caches = tuple(layer_caches(streamed.text_config, load.tensor_parallel))
    variants = (_as_it_is(plan, load, caches), *_exports(plan, load, caches))
    source = streamed.source
    assert isinstance(source, Checkpoint)
    return recipe, Outlook(plan, load, is_outline(source), variants, caches, estimate(recipe, plan))


def verdicts(plan: Plan, tensor_parallel: int = 1) -> Iterator[tuple[str, tuple[Verdict, ...]]]:
    """What each server does with each export of a plan; with a budget, with all sites at each of the bits on offer."""
    for name, settled in _settled(plan):
        for format_name in plan.formats:
            said = all_verdicts(planned_subject(settled, format_name, tensor_parallel))
            yield f"{format_name}{name}", tuple(said)


def _settled(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan, or with a budget one for each of the bits on offer, with what to add to its name."""
    if plan.settled:
        yield "", plan
        return
    for bits in sorted({bits for unit in plan.units for bits in unit.bits}):
        chosen = {
            site.name: replace(plan.specs[site.name], bits=min(unit.bits, key=lambda own: abs(own - bits)))
            for unit in plan.units
            for site in unit.sites
        }
        specs = {site.name: chosen[site.name] for site in plan.sites}
        yield f", {bits} bits", replace(plan, specs=specs, units=())


def _as_it_is(plan: Plan, load: Load, caches: Sequence[LayerCache]) -> Variant:
    each = _per_device({}, plan, load.tensor_parallel)
    kept = _kept(load, caches, None)
    return Variant("as it is", plan.source_bytes, None, each, *kept, ())


def _exports(plan: Plan, load: Load, caches: Sequence[LayerCache]) -> Iterator[Variant]:
    """One variant for each format, and for each of the bits that a budget chooses from."""
    said = dict(verdicts(plan, load.tensor_parallel))
    for name, settled in _settled(plan):
        for format_name in plan.formats:
            sites = {site.name: settled.site_bytes(format_name, site) for site in plan.sites}
            bits = 8 * sum(sites.values()) / max(1, plan.weights)
            each = _per_device(sites, plan, load.tensor_parallel)
            total_bytes = plan.rest_bytes + sum(sites.values())
            kept = _kept(load, caches, plan.kv_cache)
            yield Variant(f"{format_name}{name}", total_bytes, bits, each, *kept, said[f"{format_name}{name}"])


def _kept(load: Load, caches: Sequence[LayerCache], spec: KvCacheSpec | None) -> tuple[int, int]:
    """Bits of a number in the cache, and its bytes on each device."""
    bits = load.kv_bits or (DEFAULT_KV_BITS if spec is None else spec.bits)
    return bits, cache_bytes(list(caches), load.context, load.batch, bits)


def _per_device(sites: dict[str, int], plan: Plan, devices: int) -> int:
    """Bytes of weights on each device: matrices are split, vectors are on all of them.

    Args:
        sites: bytes of the quantized sites; the others are as they are.
    """
    split = sum(sites.values())
    whole = 0
    for key, info in plan.checkpoint.tensors.items():
        if key.removesuffix(".weight") in sites:
            continue
        if len(info.shape) > 1:
            split += info.total_bytes
        else:
            whole += info.total_bytes
    return whole + -(-split // devices)
