"""Checkpoint formats, the writing side. One file a format; the file's ``FORMAT`` is the registry entry.

To add a format, write ``formats/<name>.py`` with a module constant ``FORMAT: Format``, its independent reader in
``readers/``, and a golden-byte test. Dashes in a format's name are underscores in its file name.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from quantforge.errors import NumericsError, UsageError
from quantforge.quantized import CacheScales, QuantizedWeight
from quantforge.registry import load, names_in
from quantforge.spec import ActivationSpec, KvCacheSpec, QuantSpec, ScaleDtype

NAMED_SITES = 3


@dataclass(frozen=True)
class SiteShape:
    """A site as a format sees it: `name` is the checkpoint name without ``.weight``.

    `kind` is ``linear`` (weights stored [out, in]) or ``conv1d`` (GPT-2 style, stored [in, out]).
    """

    name: str
    out_features: int
    in_features: int
    kind: str = "linear"


@dataclass(frozen=True)
class CheckpointFacts:
    """What a whole checkpoint's config depends on, known once every site is solved.

    Attributes:
        specs: the grid of each quantized site, by its checkpoint name without ``.weight``; never empty.
        kept: names of the Linear modules left in floating point, `lm_head` included when it exists.
        has_zero_zero: some group of some site has a zero of 0.
        modules: the module path of each site whose checkpoint name is another.
        activations: the grid of the sites' inputs, None when they stay in floating point.
        act_order: the inputs of some site are in groups by an order of their own.
        kv_cache: the grid of cached keys and values, None when nothing is said of them.
    """

    specs: Mapping[str, QuantSpec]
    kept: tuple[str, ...]
    has_zero_zero: bool
    modules: Mapping[str, str] = field(default_factory=dict)
    activations: ActivationSpec | None = None
    act_order: bool = False
    kv_cache: KvCacheSpec | None = None

    def by_spec(self) -> dict[QuantSpec, list[str]]:
        """Each distinct grid with the names of its sites, checkpoint and module names; the commonest first."""
        names: dict[QuantSpec, list[str]] = {spec: [] for spec, _ in Counter(self.specs.values()).most_common()}
        for name, spec in self.specs.items():
            names[spec] += dict.fromkeys((name, self.modules.get(name, name)))
        return names


class Stored(Protocol):
    """A tensor as its header describes it: a safetensors dtype name, and a shape."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Source(Protocol):
    """What a container takes from the source: directory, config.json, headers, and tensors in their stored dtype."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Stored]: ...
    def read(self, key: str) -> torch.Tensor: ...


class Written(Protocol):
    """What a container is written from; the pipeline's `Contents`, which see, are this."""

    @property
    def source(self) -> Source: ...
    @property
    def shapes(self) -> Mapping[str, SiteShape]: ...
    @property
    def specs(self) -> Mapping[str, QuantSpec]: ...
    @property
    def packed(self) -> Collection[str]: ...
    @property
    def changed(self) -> Collection[str]: ...
    @property
    def unused(self) -> Collection[str]: ...
    def weight(self, name: str) -> QuantizedWeight: ...
    def tensor(self, key: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class Container:
    """A file of a format's own that takes the place of safetensors files.

    Attributes:
        suffix: of the file's name.
        problems: (source, names of the sites, keys of the source that are not copied) -> every reason why this model
            cannot be written, whatever its grids. Called before any weight is read.
        write: makes the file; it is flushed to the disk by the caller.
        bits_per_weight: stored bits of a weight of a grid, scales included.
    """

    suffix: str
    problems: Callable[[Source, Collection[str], Collection[str]], list[str]]
    write: Callable[[Path, Written], None]
    bits_per_weight: Callable[[QuantSpec], float]


@dataclass(frozen=True)
class Format:
    """How quantized weights are laid out in a checkpoint. Plain functions, no state.

    Attributes:
        problems: every reason why these sites, with the grid of each by name, cannot be written in this format; empty
            when they can. Called before any weight is read.
        encode: (site name, weight, facts) -> tensors by full checkpoint key, ready to be written.
        config: the ``quantization_config`` object of config.json.
        activations: True when it can say that the inputs of sites are quantized too.
        side_files: further JSON files of the format by file name (for example ``quantize_config.json``).
        scale_dtype: the dtype in which it stores scales, None when any will do.
        group_index: True when it stores the group of each input (`QuantizedWeight.group_index`).
        minima: True when it stores ``-zero * scale`` of asymmetric grids in its dtype of scales, not zeros.
        container: how it is written where that is not safetensors.
        encode_cache: (attention module, scales, their grid) -> tensors by full checkpoint key; None when it cannot hold
            scales of a cache.
    """

    name: str
    summary: str
    problems: Callable[[Mapping[str, QuantSpec], list[SiteShape]], list[str]]
    encode: Callable[[str, QuantizedWeight, CheckpointFacts], dict[str, torch.Tensor]]
    config: Callable[[CheckpointFacts], dict[str, Any]]
    side_files: Callable[[CheckpointFacts], dict[str, dict[str, Any]]]
    activations: bool = False
    scale_dtype: ScaleDtype | None = None
    group_index: bool = False
    minima: bool = False
    container: Container | None = None
    encode_cache: Callable[[str, CacheScales, KvCacheSpec], dict[str, torch.Tensor]] | None = None


def sites_by_spec(specs: Mapping[str, QuantSpec], sites: Iterable[SiteShape]) -> dict[QuantSpec, list[SiteShape]]:
    """The sites of each distinct grid."""
    found: dict[QuantSpec, list[SiteShape]] = {}
    for site in sites:
        found.setdefault(specs[site.name], []).append(site)
    return found


def conv1d(name: str, sites: Iterable[SiteShape]) -> list[str]:
    """The problem of a format for which a site is a Linear module; none when all are."""
    wrong = [site.name for site in sites if site.kind != "linear"]
    if not wrong:
        return []
    more = f" and {len(wrong) - NAMED_SITES} more" if len(wrong) > NAMED_SITES else ""
    return [
        f"{name} quantizes Linear modules only, and {len(wrong)} sites are Conv1D: {', '.join(wrong[:NAMED_SITES])}"
        f"{more}; use --format gptq"
    ]


def ragged(name: str, which: str, bits: int, multiple: int, sites: Iterable[SiteShape], advice: str = "") -> list[str]:
    """The problem of sites whose `which` (``in_features`` or ``out_features``) does not fill whole words; or none."""
    wrong = [site for site in sites if getattr(site, which) % multiple]
    if not wrong:
        return []
    shapes = ", ".join(f"{site.name} [{site.out_features}, {site.in_features}]" for site in wrong)
    return [
        f"{name} needs {which} to be a multiple of {multiple} at {bits} bits (whole 32-bit words), which [out, in] is "
        f"not at {shapes}; add these to ignore{advice}"
    ]


def as_float16(scale: torch.Tensor, name: str) -> torch.Tensor:
    """Scales of a site for a format that stores float16; NumericsError when one would change."""
    stored = scale.to(torch.float16)
    changed = stored.to(torch.float32) != scale.to(torch.float32)
    if bool(changed.any()):
        example = float(scale[changed][0])
        raise NumericsError(
            f"{name}: {int(changed.sum())} of {scale.numel()} scales cannot be stored in float16 exactly, such as "
            f"{example:.9g}, which would become {float(stored[changed][0]):.9g}; solve with scale_dtype: float16"
        )
    return stored


def format_names() -> list[str]:
    """Names of all formats, from the files of this folder."""
    return names_in(__path__)


def load_format(name: str) -> Format:
    """Import one format by name; raises UsageError naming the known ones."""
    return load(__name__, __path__, name, "FORMAT", Format, UsageError)
