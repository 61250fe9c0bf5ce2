"""Reads AutoRound's own ``auto-round`` checkpoints, packed as GPTQ version 1 (without ``g_idx``) or as AWQ."""

from collections.abc import Mapping
from typing import Any

import torch

from quantforge.errors import SourceError
from quantforge.readers import DecodedWeight, Reader, Scheme, awq, gptq
from quantforge.readers._expressions import fits
from quantforge.readers.gptq import group_keys, plain_scheme, with_override

LAYOUTS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq", "auto_round:auto_awq": "gemm"}
"""What ``packing_format`` stands for, as these layouts are called in configs of their own."""


def scheme(config: Mapping[str, Any], site: str) -> Scheme:
    """The config's settings with ``extra_config`` of the site applied: its exact name, else a pattern of all of it."""
    packing = config.get("packing_format", "auto_round:auto_gptq")
    if packing not in LAYOUTS:
        raise SourceError(f"quantization_config: packing_format {packing!r} cannot be read, only {', '.join(LAYOUTS)}")
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise SourceError(f"quantization_config: extra_config is {extra!r}; expected a mapping of sites to settings")
    names = [site] if site in extra else [name for name in extra if fits(name, site, "extra_config", whole=True)]
    settings = with_override(config, extra[names[0]], site) if names else config
    return plain_scheme(settings, LAYOUTS[packing], site)


def decode(tensors: Mapping[str, torch.Tensor], scheme: Scheme, site: str) -> DecodedWeight:
    """Codes, scales and zeros of one site; see `Reader.decode`."""
    layout = awq.READER if scheme.checkpoint_format == "gemm" else gptq.READER
    return layout.decode(tensors, scheme, site)


READER = Reader(quant_method="auto-round", group_keys=group_keys, scheme=scheme, decode=decode)
