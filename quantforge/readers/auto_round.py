"""Reads AutoRound's own ``auto-round`` checkpoints whose packing is that of GPTQ version 1 (without ``g_idx``)."""

import re
from collections.abc import Mapping
from typing import Any

from quantforge.errors import SourceError
from quantforge.readers import Reader, Scheme
from quantforge.readers.gptq import decode, group_keys, plain_scheme, with_override


def scheme(config: Mapping[str, Any], site: str) -> Scheme:
    """The config's settings with ``extra_config`` of the site applied: its exact name, else a pattern of all of it."""
    packing = config.get("packing_format", "auto_round:auto_gptq")
    if packing not in ("auto_round:auto_gptq", "auto_round:gptqmodel"):
        raise SourceError(f"quantization_config: packing_format {packing!r} cannot be read, only auto_round:auto_gptq")
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise SourceError(f"quantization_config: extra_config is {extra!r}; expected a mapping of sites to settings")
    names = [site] if site in extra else [name for name in extra if _is_pattern_of(name, site)]
    return plain_scheme(with_override(config, extra[names[0]], site) if names else config, "gptq", site)


def _is_pattern_of(name: str, site: str) -> bool:
    try:
        return re.fullmatch(name, site) is not None
    except re.error as error:
        raise SourceError(f"quantization_config: extra_config holds {name!r}, no name or pattern: {error}") from error


READER = Reader(quant_method="auto-round", group_keys=group_keys, scheme=scheme, decode=decode)
