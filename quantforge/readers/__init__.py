"""Checkpoint formats, the reading side: written from each format's specification, sharing no code with `formats/`.

A reader turns the packed tensors of one site, ours or another tool's, into codes, scales and zeros. It is used to
verify what was written, to evaluate a quantized checkpoint from its own files, and to inspect one. The file's
``READER`` is the registry entry; the file is named after the config's ``quant_method``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantforge.errors import SourceError
from quantforge.registry import load, names_in


@dataclass(frozen=True, eq=False)
class DecodedWeight:
    """A site read back: ``w[o, i] = (codes[o, i] - zero[o, g]) * scale[o, g]`` with ``g = group_index[i]``.

    Attributes:
        codes: uint8 [out, in].
        scale: [out, groups] in the dtype found in the file.
        zero: uint8 [out, groups].
        group_index: int64 [in]; ``i // group_size`` unless the file carries its own order.
        bits: width of a code.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_index: torch.Tensor
    bits: int

    def dequantize(self) -> torch.Tensor:
        """Float32 [out, in]."""
        offset = self.codes.to(torch.float32) - self.zero.to(torch.float32)[:, self.group_index]
        return offset * self.scale.to(torch.float32)[:, self.group_index]


@dataclass(frozen=True)
class ActivationScheme:
    """What a config says about the inputs of a site, or about the cache, in the words of compressed-tensors."""

    bits: int
    kind: str
    strategy: str
    dynamic: bool
    symmetric: bool

    def label(self, what: str = "activations") -> str:
        when, zero = "dynamic" if self.dynamic else "static", "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits}-bit {self.kind} {what}, per {self.strategy}, {when}, {zero}"


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint's config says about one site. `group_size` None means one scale per row.

    `activations` is None when the site's inputs stay in floating point. `checkpoint_format` is the format's own variant
    name (``gptq``, ``gptq_v2``, ``pack-quantized``, ...).
    """

    bits: int
    group_size: int | None
    symmetric: bool
    checkpoint_format: str
    activations: ActivationScheme | None = None

    def label(self) -> str:
        group = "per channel" if self.group_size is None else f"group {self.group_size}"
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        inputs = "" if self.activations is None else f", {self.activations.label()}"
        return f"{self.bits} bits, {group}, {symmetry} ({self.checkpoint_format}){inputs}"


@dataclass(frozen=True)
class CacheReader:
    """The reading side of scales for a cache of keys and values.

    Attributes:
        scheme: quantization_config -> what it says of the cache; None when it says nothing, SourceError when what it
            says is no settings.
        group_keys: checkpoint keys -> {module: {suffix: key}} for every attention module that has scales.
        decode: ({suffix: tensor}, scheme, module) -> scales of keys and of values, as they are stored, [1] or [heads];
            SourceError naming the module when one is missing, not finite, not positive, or not of the scheme's shape.
    """

    scheme: Callable[[Mapping[str, Any]], ActivationScheme | None]
    group_keys: Callable[[Iterable[str]], dict[str, dict[str, str]]]
    decode: Callable[[Mapping[str, torch.Tensor], ActivationScheme, str], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Reader:
    """The reading side of one quant_method.

    Attributes:
        group_keys: checkpoint keys -> {site name: {suffix: key}} for every quantized site found among the keys.
        scheme: (quantization_config, site name) -> Scheme; SourceError naming the key when the config is invalid.
        decode: ({suffix: tensor}, Scheme, site name) -> DecodedWeight; SourceError naming the site and the numbers on
            any wrong shape, dtype or missing tensor.
        cache: reads the scales of a cache; None for formats that have none.
    """

    quant_method: str
    group_keys: Callable[[Iterable[str]], dict[str, dict[str, str]]]
    scheme: Callable[[Mapping[str, Any], str], Scheme]
    decode: Callable[[Mapping[str, torch.Tensor], Scheme, str], DecodedWeight]
    cache: CacheReader | None = None


def reader_names() -> list[str]:
    """The quant_method values that can be read."""
    return names_in(__path__)


def load_reader(quant_method: str) -> Reader:
    """The reader for a config's ``quant_method``; raises SourceError naming the known ones."""
    return load(__name__, __path__, quant_method, "READER", Reader, SourceError)
