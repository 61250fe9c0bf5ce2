"""A quantized checkpoint seen as a float one: packed tensors are dequantized when they are read.

Any checkpoint with a reader in `quantforge.readers` works, ours or another tool's; the packed tensors themselves are
read, never a float copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from quantforge.errors import SourceError
from quantforge.model.gguf_file import gguf_files, is_gguf_file, open_gguf
from quantforge.model.shards import TensorInfo
from quantforge.model.source import Checkpoint, TensorSource, open_checkpoint, resolve_model
from quantforge.quantized import CacheScales
from quantforge.readers import ActivationScheme, DecodedWeight, Reader, Scheme, load_reader


class Copied(TensorSource, Protocol):
    """What another checkpoint is written from: tensors as they are stored, `tensors` describing each."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def copy_bytes(self, key: str, target: BinaryIO) -> None: ...


class PackedSource(TensorSource, Protocol):
    """A quantized checkpoint; implemented by `PackedCheckpoint` and by `gguf_sites.GgufSites`."""

    @property
    def checkpoint(self) -> Copied: ...
    @property
    def sites(self) -> dict[str, dict[str, str]]: ...
    @property
    def schemes(self) -> dict[str, Scheme]: ...
    @property
    def cache(self) -> Mapping[str, Mapping[str, str]]: ...
    @property
    def cache_scheme(self) -> ActivationScheme | None: ...
    def decode(self, site: str) -> DecodedWeight: ...
    def cache_scales(self) -> dict[str, CacheScales]: ...


@dataclass(frozen=True)
class PackedCheckpoint:
    """Implements `source.TensorSource` over a quantized checkpoint.

    Attributes:
        checkpoint: the files.
        reader: decodes the packed tensors.
        sites: site name -> {suffix: key} of its packed tensors.
        schemes: what the config says about each site.
        cache: attention module -> {suffix: key} of the scales of its cache.
        cache_scheme: what the config says about the cache; None when it says nothing.
    """

    checkpoint: Checkpoint
    reader: Reader
    sites: dict[str, dict[str, str]]
    schemes: dict[str, Scheme]
    cache: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cache_scheme: ActivationScheme | None = None

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config

    def keys(self) -> list[str]:
        """The keys of the float checkpoint: ``<site>.weight`` stands for a site's packed tensors."""
        packed = {key for found in (self.sites, self.cache) for parts in found.values() for key in parts.values()}
        return [key for key in self.checkpoint.tensors if key not in packed] + [f"{site}.weight" for site in self.sites]

    def is_packed(self, key: str) -> bool:
        return key.removesuffix(".weight") in self.sites

    def read(self, key: str) -> torch.Tensor:
        """A float tensor; a site's weight is float32 [out, in], dequantized from its packed tensors."""
        return (
            self.decode(key.removesuffix(".weight")).dequantize() if self.is_packed(key) else self.checkpoint.read(key)
        )

    def decode(self, site: str) -> DecodedWeight:
        """Codes, scales and zeros of one site."""
        tensors = {suffix: self.checkpoint.read(key) for suffix, key in self.sites[site].items()}
        return self.reader.decode(tensors, self.schemes[site], site)

    def cache_scales(self) -> dict[str, CacheScales]:
        """The scales of the cache, by attention module; SourceError when some cannot be meant."""
        if self.reader.cache is None or self.cache_scheme is None:
            return {}
        found = {}
        for name, parts in self.cache.items():
            tensors = {suffix: self.checkpoint.read(key) for suffix, key in parts.items()}
            found[name] = CacheScales(*self.reader.cache.decode(tensors, self.cache_scheme, name))
        return found


def open_any(model: str | Path, *, allow_pickle: bool = False) -> TensorSource:
    """Open a float or quantized checkpoint, a directory or a GGUF file beside its config.json.

    SourceError when it is quantized in a way no reader knows.
    """
    if is_gguf_file(Path(model)):
        return open_gguf(Path(model))
    path = resolve_model(model, allow_pickle=allow_pickle)
    if gguf_files(path) and not any(path.glob("*.safetensors")):
        return open_gguf(path)
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    config = quantization_config(checkpoint)
    if config is None:
        return checkpoint
    reader = load_reader(str(config.get("quant_method")))
    sites = reader.group_keys(checkpoint.keys())
    if not sites:
        raise SourceError(f"{checkpoint.path}: config.json says {config.get('quant_method')}, but nothing is packed")
    return packed_checkpoint(checkpoint, reader, sites, {site: reader.scheme(config, site) for site in sites}, config)


def packed_checkpoint(
    checkpoint: Checkpoint,
    reader: Reader,
    sites: dict[str, dict[str, str]],
    schemes: dict[str, Scheme],
    config: Mapping[str, Any],
) -> PackedCheckpoint:
    """With what keys and `config`, its quantization_config, say of a cache; SourceError when that is no settings."""
    if reader.cache is None:
        return PackedCheckpoint(checkpoint, reader, sites, schemes)
    cache = reader.cache.group_keys(checkpoint.keys())
    return PackedCheckpoint(checkpoint, reader, sites, schemes, cache, reader.cache.scheme(config))


def quantization_config(checkpoint: TensorSource) -> dict[str, Any] | None:
    """The config's ``quantization_config``, also where multimodal models keep it; None for a float checkpoint."""
    text = checkpoint.config.get("text_config")
    for config in (checkpoint.config, text if isinstance(text, dict) else {}):
        found = config.get("quantization_config")
        if isinstance(found, dict):
            return found
        if found is not None:
            raise SourceError(f"{checkpoint.path}: quantization_config is a {type(found).__name__}, not an object")
    return None
