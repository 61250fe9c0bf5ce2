"""A GGUF file as a quantized checkpoint: its blocks are sites with codes, scales and zeros, the rest is copied.

Two things the file does not keep are found again from its values. A scale that is repeated in every block of a group
gives the group size: the largest that holds for all matrices of a type. Vectors are stored in float32; they take the
model's own dtype back where it holds every value exactly.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from quantforge.model.gguf_file import FLOATS, GgufCheckpoint
from quantforge.model.shards import DTYPE_NAMES, TensorInfo
from quantforge.model.source import config_dtype
from quantforge.quantized import CacheScales
from quantforge.readers import DecodedWeight, Scheme
from quantforge.readers._blocks import BLOCK, SCHEMES, boundaries, decode_blocks

HEAD = "lm_head"
LAYERS = "model.layers."


@dataclass(frozen=True)
class GgufSites:
    """Implements `packed.PackedSource`. Build it with `read_sites`, when `odd_blocks` finds nothing.

    Attributes:
        file: the GGUF file.
        config: config.json, without what it says of a quantization.
        tensors: every tensor by checkpoint key, sorted by it; of a site its blocks, as bytes.
        sites: site name -> ``{"blocks": key}``.
        schemes: the grid of each.
        cache, cache_scheme: nothing; GGUF has no place for scales of a cache.
    """

    file: GgufCheckpoint
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    sites: dict[str, dict[str, str]]
    schemes: dict[str, Scheme]
    cache: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cache_scheme: None = None

    @property
    def path(self) -> Path:
        """Where config.json and the tokenizer are."""
        return self.file.path

    @property
    def checkpoint(self) -> "GgufSites":
        """Where tensors that are no sites are copied from."""
        return self

    def keys(self) -> list[str]:
        return list(self.tensors)

    def is_packed(self, key: str) -> bool:
        return key.removesuffix(".weight") in self.sites

    def read(self, key: str) -> torch.Tensor:
        """A tensor in the dtype of `tensors`; a site's weight is float32 [out, in], dequantized."""
        site = key.removesuffix(".weight")
        if site in self.sites:
            return self.decode(site).dequantize()
        return self.file.read(key).to(FLOATS[self.tensors[key].dtype])

    def copy_bytes(self, key: str, target: BinaryIO) -> None:
        """Append a tensor's bytes to an open file."""
        target.write(self.read(key).contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def decode(self, site: str) -> DecodedWeight:
        """Codes, scales and zeros of one site, its rows in the order of transformers."""
        return decode_blocks(self.file.rows(f"{site}.weight"), self.schemes[site], site)

    def cache_scales(self) -> dict[str, CacheScales]:
        """None."""
        return {}


def odd_blocks(file: GgufCheckpoint) -> list[str]:
    """Why tensors of the file are no sites on integer grids: those of each type in one line."""
    problems = []
    packed = [key for key in file.tensors if file.is_packed(key)]
    for kind in sorted({file.tensors[key].kind for key in packed}):
        own = [key for key in packed if file.tensors[key].kind == kind]
        if kind not in SCHEMES:
            problems.append(
                f"{len(own)} tensors are {kind}, which is no grid of codes, a scale and a whole zero for each group "
                f"({', '.join(SCHEMES)} are): {_named(file, own)}"
            )
        elif outside := [key for key in own if not _is_site(key)]:
            problems.append(
                f"{len(outside)} tensors are {kind}, and only GGUF quantizes anything but matrices of layers and the "
                f"output head: {_named(file, outside)}"
            )
    return problems


def read_sites(file: GgufCheckpoint, config: Mapping[str, Any], progress: Callable[[str, int, int], None]) -> GgufSites:
    """Read all scales and vectors once to learn group sizes and dtypes."""
    packed = [key for key in sorted(file.tensors) if file.is_packed(key)]
    changes: dict[str, set[int]] = {}
    widths: dict[str, set[int]] = {}
    for done, key in enumerate(packed, 1):
        kind = file.tensors[key].kind
        changes.setdefault(kind, set()).update(boundaries(file.rows(key), kind))
        widths.setdefault(kind, set()).add(file.tensors[key].shape[1] // BLOCK)
        progress("finding groups", done, len(packed))
    groups = {kind: BLOCK * math.gcd(*found, *widths[kind]) if found else None for kind, found in changes.items()}
    schemes = {}
    for key in packed:
        kind = file.tensors[key].kind
        schemes[key.removesuffix(".weight")] = Scheme(SCHEMES[kind][0], groups[kind], SCHEMES[kind][1], kind)
    own = DTYPE_NAMES.get(getattr(torch, config_dtype(config), torch.float32), "F32")
    tensors = {key: _info(file, key, own) for key in sorted(file.tensors)}
    return GgufSites(file, dict(config), tensors, {site: {"blocks": f"{site}.weight"} for site in schemes}, schemes)


def _info(file: GgufCheckpoint, key: str, own: str) -> TensorInfo:
    """How a tensor is written elsewhere; `own` is the model's dtype."""
    tensor = file.tensors[key]
    if file.is_packed(key):
        shape = (tensor.shape[0], tensor.total_bytes // tensor.shape[0])
        return TensorInfo("U8", shape, file.file.name, tensor.start, tensor.total_bytes)
    dtype = tensor.kind
    if len(tensor.shape) == 1 and own in FLOATS:
        values = file.read(key)
        dtype = own if torch.equal(values.to(FLOATS[own]).to(values.dtype), values) else tensor.kind
    total_bytes = math.prod(tensor.shape) * FLOATS[dtype].itemsize
    return TensorInfo(dtype, tensor.shape, file.file.name, tensor.start, total_bytes)


def _is_site(key: str) -> bool:
    return key.endswith(".weight") and (key.startswith(LAYERS) or key == f"{HEAD}.weight")


def _named(file: GgufCheckpoint, keys: list[str]) -> str:
    names = [file.tensors[key].name for key in keys]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
