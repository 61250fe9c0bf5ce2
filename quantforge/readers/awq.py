"""Reads AWQ checkpoints of version ``gemm`` (table in `formats/awq.py`): AutoAWQ, GPTQModel and AutoRound write them.

AutoAWQ's own names of settings (``w_bit``, ``q_group_size``) are read too, and GPTQModel's ``dynamic``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from quantforge.errors import SourceError
from quantforge.readers import DecodedWeight, Reader, Scheme
from quantforge.readers.gptq import (
    FLOATS,
    MARKS,
    check_symmetric_zero,
    expect,
    finite,
    group_index,
    plain_scheme,
    sites_with,
    tensor,
    unpack_rows,
    with_dynamic,
)

SUFFIXES = ("qweight", "qzeros", "scales")
BITS = 4
PER_WORD = 8
NIBBLE_OF = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word, counted from its lowest bits, each of its 8 outputs lies."""


def group_keys(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Sites are the prefixes that carry ``qweight``; biases and other tensors are left alone."""
    return sites_with(keys, SUFFIXES, MARKS)


def scheme(config: Mapping[str, Any], site: str) -> Scheme:
    """The config's settings; ``zero_point`` false is a symmetric grid."""
    version = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
    if config.get("backend") == "llm-awq" or str(version).lower() != "gemm":
        raise SourceError(
            f"quantization_config: AWQ version {version!r}, backend {config.get('backend')!r}; readable: version 'gemm'"
        )
    settings = dict(with_dynamic(config, site))
    zero_point = settings.get("zero_point", not settings.get("sym", False))
    if not isinstance(zero_point, bool):
        raise SourceError(f"quantization_config: zero_point is {zero_point!r}; expected true or false")
    settings.setdefault("bits", settings.get("w_bit"))
    settings.setdefault("group_size", settings.get("q_group_size"))
    return plain_scheme({**settings, "sym": not zero_point}, "gemm", site)


def decode(tensors: Mapping[str, torch.Tensor], scheme: Scheme, site: str) -> DecodedWeight:
    """Codes, scales and zeros of one site; see `Reader.decode`."""
    if scheme.bits != BITS:
        raise SourceError(f"{site} ({scheme.label()}): AWQ of {scheme.bits} bits cannot be read, only of {BITS}")
    qweight = tensor(tensors, "qweight", (torch.int32,), 2, site)
    qzeros = tensor(tensors, "qzeros", (torch.int32,), 2, site)
    scales = tensor(tensors, "scales", FLOATS, 2, site)
    in_features, words = qweight.shape
    out_features = words * PER_WORD
    label = f"{site} ({scheme.label()}, out {out_features}, in {in_features})"
    if scheme.group_size is not None and in_features % scheme.group_size:
        raise SourceError(f"{label}: group size {scheme.group_size} does not divide {in_features} input features")
    groups = 1 if scheme.group_size is None else in_features // scheme.group_size
    expect(qzeros, (groups, words), "qzeros", label)
    expect(scales, (groups, out_features), "scales", label)
    finite(scales, "scales", site)
    zero = _unpack(qzeros)
    if scheme.symmetric:
        check_symmetric_zero(zero, scheme, site)
    return DecodedWeight(
        _unpack(qweight), scales.t().contiguous(), zero, group_index(None, in_features, scheme, site), BITS
    )


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """int32 [rows, words] -> uint8 [8 * words, rows]."""
    nibbles = unpack_rows(packed, BITS, packed.shape[1] * PER_WORD).reshape(packed.shape[0], -1, PER_WORD)
    return nibbles[:, :, NIBBLE_OF].flatten(1).t().contiguous()


READER = Reader(quant_method="awq", group_keys=group_keys, scheme=scheme, decode=decode)
