"""The tensors of a checkpoint: packed sites decoded one by one, floats looked at for values that are no numbers."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from quantforge.errors import SourceError
from quantforge.model.shards import DTYPES
from quantforge.model.source import Checkpoint
from quantforge.patterns import FUSED
from quantforge.pipeline.examine.config import Quantization
from quantforge.pipeline.examine.files import Files
from quantforge.pipeline.examine.findings import Finding, error, refused, warning
from quantforge.readers import DecodedWeight, Scheme

NEAR = 0.35
"""How far, in steps of the grid, the mean of codes minus zeros may be from where a version puts it."""


@dataclass(frozen=True)
class Site:
    """A site that could be decoded.

    Attributes:
        shape: [out, in].
        offset: mean of code minus zero, in steps of the grid; near 0 for trained weights.
        wrapped: how many zeros are 0.
    """

    scheme: Scheme
    shape: tuple[int, int]
    offset: float
    wrapped: int


def read_sites(
    files: Files, quantization: Quantization, compare: Callable[[str, Scheme, DecodedWeight], Iterator[Finding]]
) -> tuple[dict[str, Site], list[Finding]]:
    """Decode every site, one in memory at a time; `compare` is given each."""
    found: dict[str, Site] = {}
    findings: list[Finding] = []
    reader, settings = quantization.reader, quantization.settings
    if reader is None or settings is None:
        return found, findings
    for name, parts in quantization.sites.items():
        try:
            scheme = reader.scheme(settings, name)
        except SourceError as fault:
            findings.append(
                refused(fault, name) if fault.code == "ignored" else error("quant-config", name, str(fault))
            )
            continue
        try:
            decoded = reader.decode({s: files.checkpoint.read(key) for s, key in parts.items()}, scheme, name)
        except SourceError as fault:
            findings.append(refused(fault, name))
            continue
        offsets = decoded.codes.to(torch.int16) - decoded.zero.to(torch.int16)[:, decoded.group_index]
        out_features, in_features = decoded.codes.shape
        wrapped = int((decoded.zero == 0).sum())
        found[name] = Site(scheme, (out_features, in_features), float(offsets.float().mean()), wrapped)
        findings += _zero_scales(name, decoded)
        findings += _order(name, decoded, quantization)
        findings += compare(name, scheme, decoded)
    return found, findings


def _zero_scales(name: str, decoded: DecodedWeight) -> Iterator[Finding]:
    zeros = int((decoded.scale == 0).sum())
    if zeros == decoded.scale.numel():
        yield error("zero-scale", name, f"{name}: all {zeros} scales are zero, and so is the whole matrix")
    elif zeros:
        yield warning(
            "zero-scale", name, f"{name}: {zeros} of {decoded.scale.numel()} scales are zero, and their groups"
        )


def _order(name: str, decoded: DecodedWeight, quantization: Quantization) -> Iterator[Finding]:
    index = decoded.group_index
    settings = quantization.settings or {}
    if settings.get("desc_act") is False and bool((index[1:] < index[:-1]).any()):
        text = f"{name}: g_idx gives inputs to groups in an order of its own, and desc_act is false"
        yield error(
            "order", name, f"{text}: servers then ignore g_idx and compute something else; set desc_act to true"
        )


def check_cache(files: Files, quantization: Quantization) -> tuple[set[str], list[Finding]]:
    """Keys of the scales of a cache that the config asks for, and what is wrong with them or with what it says."""
    reader, settings = quantization.reader, quantization.settings
    if reader is None or reader.cache is None or settings is None:
        return set(), []
    cached = reader.cache.group_keys(files.checkpoint.keys())
    try:
        scheme = reader.cache.scheme(settings)
    except SourceError as fault:
        return set(), [error("quant-config", "config.json", str(fault))]
    if scheme is None:
        return set(), [
            warning("cache-scheme", name, f"{name} has scales of a cache, and no kv_cache_scheme says what they mean")
            for name in cached
        ]
    findings = []
    for name, parts in cached.items():
        try:
            reader.cache.decode({s: files.checkpoint.read(key) for s, key in parts.items()}, scheme, name)
        except SourceError as fault:
            findings.append(refused(fault, name))
    return {key for parts in cached.values() for key in parts.values()}, findings


def check_floats(checkpoint: Checkpoint, packed: set[str]) -> Iterator[Finding]:
    """NaN and infinities in tensors that are not packed (a reader looks at the scales of those that are)."""
    for key, info in checkpoint.tensors.items():
        if key in packed or not (DTYPES[info.dtype].is_floating_point or DTYPES[info.dtype].is_complex):
            continue
        try:
            tensor = checkpoint.read(key)
        except SourceError as fault:
            yield refused(fault, key)
            continue
        if tensor.dtype.itemsize == 1:
            tensor = tensor.float()
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            yield error("not-finite", key, f"{key}: {bad} of {tensor.numel()} values are NaN or infinite")


def check_version(quantization: Quantization, sites: Mapping[str, Site]) -> tuple[list[Finding], list[str]]:
    """Whether the zeros of asymmetric gptq sites are those of the version that the config names, as far as it shows.

    Symmetric sites tell it for certain, when they are read. The mean of trained weights is small beside a step of a
    4-bit grid, and zeros of the other version move all weights by a whole step. Where the means of the sites disagree,
    as with fine grids, it cannot be told.
    """
    asymmetric = {
        name: site
        for name, site in sites.items()
        if site.scheme.checkpoint_format in ("gptq", "gptq_v2") and not site.scheme.symmetric
    }
    if not asymmetric:
        return [], []
    version = next(iter(asymmetric.values())).scheme.checkpoint_format
    other, shift = ("gptq_v2", -1.0) if version == "gptq" else ("gptq", 1.0)
    counts = torch.tensor([float(site.shape[0] * site.shape[1]) for site in asymmetric.values()])
    offsets = torch.tensor([site.offset for site in asymmetric.values()])
    mean = float((offsets * counts).sum() / counts.sum())
    spread = float(((offsets - mean).square() * counts).sum().div(counts.sum()).sqrt())
    measured = f"weights of {len(asymmetric)} asymmetric sites lie {mean:+.2f} steps from 0 on average"
    findings: list[Finding] = []
    wrapped = sum(site.wrapped for site in asymmetric.values())
    if wrapped and version == "gptq":
        text = f"{wrapped} zeros are 0, stored as -1, which wraps; loaders that add 1 without a mask read another zero"
        findings.append(warning("version-wrap", "config.json", f"{text}. gptq_v2 holds them as they are"))
    if spread > NEAR or (abs(mean) > NEAR and abs(mean - shift) > NEAR):
        note = f"whether checkpoint_format is rightly {version} cannot be told: {measured} (+-{spread:.2f})"
        return findings, [note + "; give the original with --reference"]
    if abs(mean) <= NEAR:
        return findings, [f"checkpoint_format {version} agrees with the zeros: {measured}"]
    text = f"checkpoint_format says {version}, but {measured}, and about 0 if it were {other}: set it to {other}"
    return [error("version", "config.json", text), *findings], []


def check_fused(checkpoint: Checkpoint, sites: Mapping[str, Site]) -> Iterator[Finding]:
    """Matrices that servers put side by side into one, and that are not alike."""
    parents: dict[str, set[str]] = defaultdict(set)
    for name in sites:
        parents[name.rpartition(".")[0]].add(name.rpartition(".")[2])
    for parent, leaves in parents.items():
        for parts in FUSED.values():
            packed = [f"{parent}.{part}" for part in parts if part in leaves]
            kept = [f"{parent}.{part}" for part in parts if f"{parent}.{part}.weight" in checkpoint.tensors]
            kept = [name for name in kept if name not in packed]
            labels = {name: sites[name].scheme.label() for name in packed}
            if packed and kept:
                text = f"{', '.join(kept)} in floating point, {', '.join(packed)} not"
            elif len(set(labels.values())) > 1:
                text = "; ".join(f"{name}: {label}" for name, label in labels.items())
            else:
                continue
            advice = f"vLLM and SGLang fuse {', '.join(parts)} and refuse sets that are not alike"
            yield warning("fused", (kept or packed)[0], f"{advice}: {text}")
