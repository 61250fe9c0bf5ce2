"""Reads GPTQ checkpoints, versions 1 and 2, from their specification (see the table in `formats/gptq.py`).

Also what AutoGPTQ, GPTQModel, AutoRound and others write: act-order (``g_idx``) or no ``g_idx`` at all, per-module
``dynamic`` settings, inputs that are no multiple of the group size.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from quantforge.errors import SourceError
from quantforge.readers import DecodedWeight, Reader, Scheme
from quantforge.readers._expressions import fits

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
MARKS = ("qweight", "qzeros")
BITS = (2, 3, 4, 8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
GROUP_LIMIT = 1 << 31
WORDS_AT_ONCE = 1 << 20  # bounds the memory of unpacking, 32 bytes a word


def group_keys(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Sites are the prefixes that carry ``qweight`` or ``qzeros``; biases and other tensors are left alone."""
    return sites_with(keys, SUFFIXES, MARKS)


def scheme(config: Mapping[str, Any], site: str) -> Scheme:
    """The config's settings, with the first ``dynamic`` rule that matches the site applied."""
    settings = with_dynamic(config, site)
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise SourceError(f"quantization_config: checkpoint_format is {version!r}; readable: 'gptq', 'gptq_v2'")
    return plain_scheme(settings, version, site)


def with_dynamic(config: Mapping[str, Any], site: str) -> Mapping[str, Any]:
    """The config with the first ``dynamic`` rule that matches the site applied; SourceError when it skips the site."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise SourceError(f"quantization_config: dynamic is {dynamic!r}; expected a mapping of patterns to settings")
    for rule, override in dynamic.items():
        pattern = rule[2:] if rule[:2] in ("+:", "-:") else rule
        if fits(pattern, site, "dynamic"):
            if rule.startswith("-:"):
                raise SourceError(
                    f"{site} has packed tensors, but dynamic rule {rule!r} says it is not quantized", "ignored"
                )
            return with_override(config, override, site)
    return config


def with_override(config: Mapping[str, Any], override: Any, site: str) -> Mapping[str, Any]:
    """`config` with a site's own settings on top."""
    if not isinstance(override, Mapping):
        raise SourceError(f"quantization_config: the settings for {site} are {override!r}; expected a mapping")
    return {**config, **override}


def plain_scheme(settings: Mapping[str, Any], version: str, site: str) -> Scheme:
    """A Scheme from ``bits``, ``group_size`` (-1: per channel) and ``sym``, each checked."""
    bits, group_size, symmetric = settings.get("bits"), settings.get("group_size"), settings.get("sym")
    where = f"quantization_config, as it applies to {site}:"
    if type(bits) is not int or bits not in BITS:
        raise SourceError(f"{where} bits is {bits!r}; readable: {', '.join(map(str, BITS))}")
    if type(group_size) is not int or not (1 <= group_size < GROUP_LIMIT or group_size == -1):
        raise SourceError(f"{where} group_size is {group_size!r}; expected a positive number, or -1 for whole rows")
    if not isinstance(symmetric, bool):
        raise SourceError(f"{where} sym is {symmetric!r}; expected true or false")
    return Scheme(bits, None if group_size == -1 else group_size, symmetric, version)


def decode(tensors: Mapping[str, torch.Tensor], scheme: Scheme, site: str) -> DecodedWeight:
    """Codes, scales and zeros of one site; see `Reader.decode`."""
    bits = scheme.bits
    qweight = tensor(tensors, "qweight", (torch.int32,), 2, site)
    qzeros = tensor(tensors, "qzeros", (torch.int32,), 2, site)
    scales = tensor(tensors, "scales", FLOATS, 2, site)
    g_idx = tensor(tensors, "g_idx", (torch.int32, torch.int64), 1, site) if "g_idx" in tensors else None
    rows, out_features = qweight.shape
    in_features = rows * 32 // bits if g_idx is None else g_idx.shape[0]
    groups = 1 if scheme.group_size is None else -(-in_features // scheme.group_size)
    label = f"{site} ({scheme.label()}, out {out_features}, in {in_features})"
    expect(qweight, (words_for(in_features, bits), out_features), "qweight", label)
    expect(qzeros, (groups, words_for(out_features, bits)), "qzeros", label)
    expect(scales, (groups, out_features), "scales", label)
    finite(scales, "scales", site)
    codes = unpack_rows(qweight.t(), bits, in_features)
    zero = unpack_rows(qzeros, bits, out_features).t().contiguous()
    if scheme.checkpoint_format == "gptq":
        zero = (zero + 1) & ((1 << bits) - 1)
    if scheme.symmetric:
        check_symmetric_zero(zero, scheme, site)
    return DecodedWeight(codes, scales.t().contiguous(), zero, group_index(g_idx, in_features, scheme, site), bits)


def check_symmetric_zero(zero: torch.Tensor, scheme: Scheme, site: str) -> None:
    """A symmetric grid has one zero; all off by one means that the header names the wrong version."""
    middle = 1 << (scheme.bits - 1)
    if bool((zero == middle).all()):
        return
    values = sorted(set(zero.flatten().tolist()))
    shift = {"gptq": 1, "gptq_v2": -1}.get(scheme.checkpoint_format)
    if shift is not None and values == [middle + shift]:
        other = "gptq_v2" if scheme.checkpoint_format == "gptq" else "gptq"
        raise SourceError(
            f"{site}: checkpoint_format says {scheme.checkpoint_format}, but every zero then reads {values[0]} where a "
            f"symmetric {scheme.bits}-bit grid has {middle}; these are {other} zeros: set checkpoint_format to it",
            "version",
        )
    raise SourceError(
        f"{site}: the config says symmetric (zero {middle}), but the file holds zeros {values[:8]}", "zeros"
    )


def group_index(index: torch.Tensor | None, in_features: int, scheme: Scheme, site: str) -> torch.Tensor:
    """int64 [in]: `index`, or ``i // group_size`` without one. Each group must own as many inputs as its size says."""
    regular = torch.arange(in_features) // (scheme.group_size or in_features)
    if index is None:
        return regular
    index = index.to(torch.int64)
    groups = int(regular[-1]) + 1
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        raise SourceError(
            f"{site}: g_idx spans {low} to {high}; {groups} groups are numbered 0 to {groups - 1}", "order"
        )
    sizes, expected = torch.bincount(index, minlength=groups), torch.bincount(regular, minlength=groups)
    if not torch.equal(sizes, expected):
        bad = int((sizes != expected).nonzero()[0])
        raise SourceError(
            f"{site}: g_idx gives group {bad} {int(sizes[bad])} inputs instead of {int(expected[bad])} "
            f"(in {in_features}, group size {scheme.group_size})",
            "order",
        )
    return index


# ------------------------------------------------------------------------- shared by the readers of packed words


def sites_with(keys: Iterable[str], suffixes: Collection[str], marks: Collection[str]) -> dict[str, dict[str, str]]:
    """{site: {suffix: key}} of the prefixes that carry one of the `marks`, with all their `suffixes`."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        site, _, suffix = key.rpartition(".")
        if site and suffix in suffixes:
            found.setdefault(site, {})[suffix] = key
    return {site: parts for site, parts in found.items() if any(mark in parts for mark in marks)}


def words_for(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def unpack_rows(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [rows, words] -> uint8 [rows, count]: each row is a stream of bits, least significant first."""
    if bits in (4, 8):  # whole bytes hold whole codes
        raw = np.ascontiguousarray(words.numpy(), dtype="<i4").view(np.uint8)
        if bits == 4:
            raw = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)
        return torch.from_numpy(np.ascontiguousarray(raw[:, :count]))
    codes = np.zeros((words.shape[0], count), dtype=np.uint8)
    step = max(1, WORDS_AT_ONCE // max(1, words.shape[1]))
    for start in range(0, words.shape[0], step):
        block = np.ascontiguousarray(words[start : start + step].numpy(), dtype="<i4")
        stream = np.unpackbits(block.view(np.uint8), axis=1, count=count * bits, bitorder="little")
        for bit in range(bits):
            codes[start : start + step] |= stream[:, bit::bits] << bit
    return torch.from_numpy(codes)


def tensor(
    tensors: Mapping[str, torch.Tensor], suffix: str, dtypes: tuple[torch.dtype, ...], dims: int, site: str
) -> torch.Tensor:
    """The tensor `suffix` of a site, if it is there with one of the dtypes and that many dims."""
    if suffix not in tensors:
        raise SourceError(
            f"{site}: tensor {suffix} is missing; present: {', '.join(sorted(tensors)) or 'none'}", "part-missing"
        )
    found = tensors[suffix]
    if found.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise SourceError(f"{site}: {suffix} is {found.dtype}, expected {expected}", "dtype")
    if found.ndim != dims or found.numel() == 0:
        raise SourceError(
            f"{site}: {suffix} has shape {list(found.shape)}, expected {dims} dims, none of them empty", "shape"
        )
    return found


def expect(found: torch.Tensor, shape: tuple[int, ...], suffix: str, label: str) -> None:
    if tuple(found.shape) != shape:
        raise SourceError(f"{label}: {suffix} has shape {list(found.shape)}, expected {list(shape)}", "shape")


def finite(scales: torch.Tensor, suffix: str, site: str) -> None:
    bad = int((~torch.isfinite(scales)).sum())
    if bad:
        raise SourceError(f"{site}: {bad} of {scales.numel()} values of {suffix} are not finite", "not-finite")


READER = Reader(quant_method="gptq", group_keys=group_keys, scheme=scheme, decode=decode)
