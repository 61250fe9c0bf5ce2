"""What a quantized checkpoint holds, carried into another format: codes, scales and zeros as they are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch

from quantforge.errors import SourceError
from quantforge.formats import CheckpointFacts, SiteShape
from quantforge.model.activations import activation_spec
from quantforge.model.kv_cache import cache_spec
from quantforge.model.packed import Copied, PackedSource, quantization_config
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline.plan import scale_dtype_of
from quantforge.quantized import SCALE_DTYPES, CacheScales, QuantizedWeight
from quantforge.readers import DecodedWeight
from quantforge.spec import ActivationSpec, Bits, KvCacheSpec, QuantSpec, ScaleDtype

Progress = Callable[[str, int, int], None]

BEYOND = ("sparsity_config", "transform_config", "activation", "act_bits")
"""What a ``quantization_config`` may ask for beyond what readers tell; a conversion would lose it."""

NOTHING = ({"format": "dense"}, 16)
"""Values of these that ask for nothing, besides false ones."""


@dataclass
class Survey:
    """What is known of the values once every site has been read.

    Attributes:
        scales: count of scales.
        zero_zero: sites with a zero of 0.
        act_order: sites whose inputs are in groups by an order of their own.
        short: sites whose last group is short.
        inexact: for each dtype the sites with scales that it cannot hold, and how many.
        minima: sites of asymmetric grids with groups whose ``-zero * scale`` float16 cannot hold, and how many.
    """

    scales: int = 0
    zero_zero: list[str] = field(default_factory=list)
    act_order: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    inexact: dict[ScaleDtype, dict[str, int]] = field(
        default_factory=lambda: {dtype: {} for dtype in get_args(ScaleDtype)}
    )
    minima: dict[str, int] = field(default_factory=dict)


class Carried:
    """Implements `contents.Contents` over a quantized checkpoint, ours or another tool's; no weights are kept.

    Attributes:
        beyond: why it is no checkpoint that can be carried over into any format; empty when it can.
        specs: the grids; the dtype of scales is settled by `settle`.
        notes: what deserves to be said.
    """

    def __init__(self, packed: PackedSource, *, trust_remote_code: bool, progress: Progress) -> None:
        model = StreamedModel(packed, trust_remote_code=trust_remote_code)
        self._packed, self._progress = packed, progress
        self._layout = model.layout
        self.source: Copied = packed.checkpoint
        self.config: Mapping[str, Any] = without_quantization(packed.config)
        self.packed = {key: name for name, parts in packed.sites.items() for key in parts.values()}
        self.changed: frozenset[str] = frozenset()
        self.beyond = _beyond(packed)
        self.kv_cache: KvCacheSpec | None = None
        self.cache_scales: Mapping[str, CacheScales] = {}
        self._settle_cache()
        scales = {key for parts in packed.cache.values() for key in parts.values()}
        self.unused = frozenset([*model.duplicates, *scales])
        self.activations: ActivationSpec | None = None
        self._settle_activations()
        self.shapes = self._shapes()
        self.specs: Mapping[str, QuantSpec] = {
            name: QuantSpec(scheme.bits, scheme.group_size, scheme.symmetric)
            for name, scheme in ((name, packed.schemes[name]) for name in self.shapes)
            if scheme.bits in get_args(Bits)
        }
        self.notes = [f"{key} repeats the tensor it is tied to and is written once" for key in model.duplicates]
        self.notes += [
            f"warning: config.json ties {name}, but the checkpoint holds other values for it; both are kept"
            for name in model.untied
        ]
        self._seen: dict[str, set[str]] = {}

    def _settle_activations(self) -> None:
        found: dict[ActivationSpec | None, list[str]] = {}
        for name, scheme in self._packed.schemes.items():
            try:
                found.setdefault(activation_spec(scheme.activations, name), []).append(name)
            except SourceError as error:
                self.beyond.append(str(error))
                return
        if len(found) > 1:
            count = len(found[None])
            self.beyond.append(
                f"inputs of {count} of {len(self._packed.schemes)} sites stay in floating point, others not"
            )
        self.activations = next(iter(found))

    def _settle_cache(self) -> None:
        scheme, modules = self._packed.cache_scheme, len(self._packed.cache)
        if scheme is None and modules:
            self.beyond.append(f"{modules} modules have scales of a cache, and no kv_cache_scheme says what they mean")
        elif scheme is not None and not modules:
            asked = (quantization_config(self.source) or {})["kv_cache_scheme"]
            self.beyond.append(f"kv_cache_scheme is {asked!r} in its quantization_config, and no module has scales")
        elif scheme is not None:
            try:
                self.kv_cache, self.cache_scales = cache_spec(scheme), self._packed.cache_scales()
            except SourceError as error:
                self.beyond.append(str(error))

    def _shapes(self) -> dict[str, SiteShape]:
        """In the model's order; a site outside of its decoder layers (an output head) is read to learn its own."""
        sites = self._packed.sites
        shapes = {site.name: site.shape for site in self._layout.sites if site.name in sites}
        for name in [name for name in sites if name not in shapes]:
            out_features, in_features = self._packed.decode(name).codes.shape
            shapes[name] = SiteShape(name, out_features, in_features)
        return shapes

    def survey(self) -> Survey:
        """Read every site once. Raises SourceError for a site that is damaged or has not the shape the model needs."""
        found = Survey()
        for name in self.shapes:
            decoded = self._decode("reading", name)
            shape = (self.shapes[name].out_features, self.shapes[name].in_features)
            if tuple(decoded.codes.shape) != shape:
                raise SourceError(f"{name} is {list(decoded.codes.shape)} [out, in], the model needs {list(shape)}")
            found.scales += decoded.scale.numel()
            if not bool(decoded.zero.all()):
                found.zero_zero.append(name)
            if not torch.equal(decoded.group_index, _regular(self.specs[name], shape[1])):
                found.act_order.append(name)
            elif not self.specs[name].fits(shape[1]):
                found.short.append(name)
            exact = decoded.scale.to(torch.float32)
            for dtype, sites in found.inexact.items():
                if changed := _changed(exact, SCALE_DTYPES[dtype]):
                    sites[name] = changed
            if not self.specs[name].symmetric and (changed := _changed(decoded.zero * exact, torch.float16)):
                found.minima[name] = changed
        return found

    def settle(self, survey: Survey, scale_dtype: ScaleDtype | None) -> None:
        """Choose the dtype of scales: the format's own, else the model's where it is exact, else one that is."""
        preferred: tuple[ScaleDtype, ...] = (scale_dtype_of(self.source), *get_args(ScaleDtype))
        chosen: ScaleDtype = next(d for d in preferred if not survey.inexact[d]) if scale_dtype is None else scale_dtype
        self.specs = {name: replace(spec, scale_dtype=chosen) for name, spec in self.specs.items()}

    def facts(self, survey: Survey) -> CheckpointFacts:
        """What the config of the new checkpoint depends on."""
        sites, names = self._layout.sites, self._packed.sites
        left = [name for site in sites if site.name not in names for name in (site.name, site.module)]
        quantized = {*names, *(site.module for site in sites if site.name in names)}
        holders = {name[:end] for name in quantized for end, letter in enumerate(name) if letter == "."}
        kept = dict.fromkeys([*self._layout.kept_linears, *left])
        return CheckpointFacts(
            specs=self.specs,
            kept=tuple(name for name in kept if name not in quantized | holders),
            has_zero_zero=bool(survey.zero_zero),
            modules={site.name: site.module for site in sites if site.name in names and site.module != site.name},
            activations=self.activations,
            act_order=bool(survey.act_order),
            kv_cache=self.kv_cache,
        )

    def weight(self, name: str) -> QuantizedWeight:
        """One site, its scales in the dtype that was settled."""
        decoded, spec = self._decode("writing", name), self.specs[name]
        in_features = decoded.codes.shape[1]
        plain = spec.fits(in_features) and torch.equal(decoded.group_index, _regular(spec, in_features))
        scale = decoded.scale.to(SCALE_DTYPES[spec.scale_dtype])
        assert torch.equal(scale.to(torch.float32), decoded.scale.to(torch.float32)), "the survey found this exact"
        return QuantizedWeight(spec, decoded.codes, scale, decoded.zero, None if plain else decoded.group_index)

    def expected(self, name: str) -> DecodedWeight:
        """What the source holds."""
        return self._decode("verifying", name)

    def tensor(self, key: str) -> torch.Tensor:
        """Never asked: nothing is changed."""
        raise KeyError(key)

    def _decode(self, what: str, name: str) -> DecodedWeight:
        decoded = self._packed.decode(name)
        seen = self._seen.setdefault(what, set())
        seen.add(name)
        self._progress(what, len(seen), len(self.shapes))
        return decoded


def _changed(values: torch.Tensor, dtype: torch.dtype) -> int:
    """How many float32 values `dtype` cannot hold."""
    return int((values.to(dtype).to(torch.float32) != values).sum())


def _regular(spec: QuantSpec, in_features: int) -> torch.Tensor:
    """int64 [in]: the group of each input where groups follow each other."""
    return torch.arange(in_features) // (spec.group_size or in_features)


def _beyond(packed: PackedSource) -> list[str]:
    config = quantization_config(packed.checkpoint) or {}
    asked = {key: config[key] for key in BEYOND if config.get(key) and config[key] not in NOTHING}
    problems = [
        f"{key} is {value!r} in its quantization_config, which a conversion would lose" for key, value in asked.items()
    ]
    if other := sorted({scheme.bits for scheme in packed.schemes.values()} - set(get_args(Bits))):
        count = sum(scheme.bits in other for scheme in packed.schemes.values())
        known = ", ".join(map(str, get_args(Bits)))
        problems.append(f"{count} sites have {', '.join(map(str, other))} bits; formats here hold {known}")
    return problems


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without ``quantization_config``, also where multimodal models keep it."""
    rest = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(text := rest.get("text_config"), dict):
        rest["text_config"] = without_quantization(text)
    return rest
