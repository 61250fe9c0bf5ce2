"""What a checkpoint holds, from its config and headers; no weights are read."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantforge.model.gguf_file import GgufCheckpoint, is_gguf_file
from quantforge.model.packed import PackedCheckpoint, open_any, quantization_config
from quantforge.model.sites import ModelLayout
from quantforge.model.source import Checkpoint
from quantforge.model.streamed import StreamedModel

BLOCK = 32


@dataclass(frozen=True)
class SiteRow:
    """One quantized matrix, shape [out, in]; `bits_per_weight` counts every byte stored for it.

    `activations` says how its inputs are quantized, None when they are not.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    group_size: int | None
    bits_per_weight: float
    activations: str | None = None


@dataclass(frozen=True)
class CheckpointDescription:
    """Attributes are what `inspect` prints; `kept` maps each matrix left in floating point to the reason.

    `kv_cache` says what the scales of a cache are for, None when there are none.
    """

    path: str
    model_type: str
    scheme: str
    format: str
    parameters: int
    total_bytes: int
    bits_per_weight: float
    quantized: tuple[SiteRow, ...]
    kept: dict[str, str]
    files: dict[str, int]
    kv_cache: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_checkpoint(
    path: str, allow_pickle: bool = False, trust_remote_code: bool = False
) -> CheckpointDescription:
    """Describe a float or quantized checkpoint, a directory or a GGUF file.

    Raises SourceError when its files are inconsistent.
    """
    source = open_any(path, allow_pickle=allow_pickle)
    layout: ModelLayout = StreamedModel(source, trust_remote_code=trust_remote_code).layout
    checkpoint = source.checkpoint if isinstance(source, PackedCheckpoint) else source
    assert isinstance(checkpoint, Checkpoint | GgufCheckpoint)
    rows: tuple[SiteRow, ...] = ()
    scheme = "not quantized"
    kept = dict(layout.kept)
    labels: list[str] = []
    packed_keys = {key for key in checkpoint.tensors if checkpoint.is_packed(key)}
    if isinstance(source, PackedCheckpoint):
        packed_keys = {
            key for found in (source.sites, source.cache) for parts in found.values() for key in parts.values()
        }
        rows = tuple(_row(source, layout))
        labels = [scheme.label() for scheme in source.schemes.values()]
    elif isinstance(source, GgufCheckpoint):
        rows = tuple(_blocks(source))
        labels = [f"{source.tensors[key].kind}, blocks of {BLOCK}" for key in packed_keys]
    if labels:
        scheme = "; ".join(f"{label}: {count} sites" for label, count in Counter(labels).most_common())
    packed = {row.name for row in rows}
    kept |= {f"{site.module}.weight": "left in floating point" for site in layout.sites if site.name not in packed}
    weights = sum(row.shape[0] * row.shape[1] for row in rows)
    stored_bits = sum(row.bits_per_weight * row.shape[0] * row.shape[1] for row in rows)
    config = quantization_config(checkpoint) or {}
    files = [Path(path)] if is_gguf_file(Path(path)) else sorted(checkpoint.path.iterdir())
    sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    floats = sum(math.prod(info.shape) for key, info in checkpoint.tensors.items() if key not in packed_keys)
    return CheckpointDescription(
        path=str(path),
        model_type=str(checkpoint.config.get("model_type", "unknown")),
        scheme=scheme,
        format="gguf" if isinstance(source, GgufCheckpoint) else str(config.get("quant_method", "safetensors")),
        parameters=floats + weights,
        total_bytes=sum(sizes.values()),
        bits_per_weight=stored_bits / weights if weights else 0.0,
        quantized=rows,
        kept=kept,
        files=sizes,
        kv_cache=_cache(source) if isinstance(source, PackedCheckpoint) else None,
    )


def _cache(source: PackedCheckpoint) -> str | None:
    if source.cache_scheme is None:
        return None
    return f"{source.cache_scheme.label('keys and values')}: scales of {len(source.cache)} layers"


def _row(source: PackedCheckpoint, layout: ModelLayout) -> list[SiteRow]:
    shapes = {site.name: (site.out_features, site.in_features) for site in layout.sites}
    rows = []
    for name, parts in source.sites.items():
        shape = shapes.get(name)
        if shape is None:  # a head or another matrix outside the decoder layers that some tool quantized
            codes = source.decode(name).codes.shape
            shape = (int(codes[0]), int(codes[1]))
        stored = sum(source.checkpoint.tensors[key].total_bytes for key in parts.values())
        scheme = source.schemes[name]
        inputs = None if scheme.activations is None else scheme.activations.label()
        rows.append(SiteRow(name, shape, scheme.bits, scheme.group_size, 8 * stored / (shape[0] * shape[1]), inputs))
    return rows


def _blocks(source: GgufCheckpoint) -> Iterator[SiteRow]:
    """The matrices of a GGUF file that are stored as blocks; a block is a group of its own."""
    for key, tensor in source.tensors.items():
        if source.is_packed(key):
            out_features, in_features = tensor.shape
            stored = 8 * tensor.total_bytes / (out_features * in_features)
            bits = int(re.findall(r"\d", tensor.kind)[0])
            yield SiteRow(key.removesuffix(".weight"), (out_features, in_features), bits, BLOCK, stored)
