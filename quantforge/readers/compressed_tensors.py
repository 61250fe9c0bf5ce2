"""Reads compressed-tensors checkpoints with integer weights, from their specification (table in `formats/`).

``pack-quantized`` (1 to 8 bits, dense stream) and ``int-quantized`` (int8 weights). A config group targets sites by
exact name, by ``re:`` pattern or by class name (``Linear``); of several groups that do,
an exact name beats a pattern, and a pattern beats a class.

Scales of the cache (``kv_cache_scheme``) are ``k_scale`` and ``v_scale`` of each attention module: one number each
(strategy ``tensor``), or one for each key-value head, [heads, 1, 1] (``attn_head``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from quantforge.errors import SourceError
from quantforge.readers import ActivationScheme, CacheReader, DecodedWeight, Reader, Scheme
from quantforge.readers._expressions import fits
from quantforge.readers.gptq import (
    FLOATS,
    expect,
    finite,
    group_index,
    sites_with,
    tensor,
    unpack_rows,
    words_for,
)

PACKED = "pack-quantized"
UNPACKED = ("int-quantized", "naive-quantized")
SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight")
CACHED = ("k_scale", "v_scale", "k_zero_point", "v_zero_point")
ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


def group_keys(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Sites are the prefixes that carry ``weight_packed`` or ``weight_scale``; plain float weights are left alone."""
    return sites_with(keys, SUFFIXES + ACTIVATIONS, ("weight_packed", "weight_scale"))


def scheme(config: Mapping[str, Any], site: str) -> Scheme:
    """What the config group that targets the site most specifically says of its weights."""
    for entry in _strings(config.get("ignore") or [], "ignore"):
        if _specificity(entry, site) > 0:
            raise SourceError(
                f"{site} has quantized tensors, but {entry!r} in ignore says it is not quantized", "ignored"
            )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise SourceError("quantization_config: config_groups is missing or empty")
    targets = {name: _targets(group, name) for name, group in groups.items()}
    rank = {name: max((_specificity(target, site) for target in found), default=0) for name, found in targets.items()}
    name = max(rank, key=lambda name: rank[name])  # the first of equals
    if rank[name] == 0:
        raise SourceError(f"quantization_config: no config group targets {site}; targets: {targets}")
    group = groups[name]
    weights = _weights_scheme(group.get("weights"), group.get("format") or config.get("format"), name)
    return replace(weights, activations=_activations(group, name))


def _targets(group: Any, name: str) -> list[str]:
    if not isinstance(group, Mapping):
        raise SourceError(f"quantization_config: config_groups.{name} is {group!r}; expected a mapping")
    return _strings(group.get("targets") or [], f"config_groups.{name}.targets")


def _strings(value: Any, key: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise SourceError(f"quantization_config: {key} is {value!r}; expected a list of strings")
    return value


def _specificity(target: str, site: str) -> int:
    """3 for the site's name, 2 for a pattern that matches it, 1 for its class (a site is a Linear), 0 for no match."""
    if target == site:
        return 3
    if target.startswith("re:"):
        return 2 if fits(target[3:], site, "config_groups or ignore") else 0
    return 1 if target == "Linear" else 0


def _weights_scheme(weights: Any, layout: Any, group: str) -> Scheme:
    where = f"quantization_config, config_groups.{group}:"
    if layout not in (PACKED, *UNPACKED):
        raise SourceError(f"{where} format {layout!r} cannot be read; readable: {', '.join((PACKED, *UNPACKED))}")
    if not isinstance(weights, Mapping):
        raise SourceError(f"{where} weights is {weights!r}, so its sites are not quantized")
    bits, group_size, strategy = weights.get("num_bits"), weights.get("group_size"), weights.get("strategy")
    if weights.get("type", "int") != "int" or type(bits) is not int or not 1 <= bits <= 8:
        raise SourceError(f"{where} weights are {weights.get('type')!r} of {bits!r} bits; readable: int of 1 to 8 bits")
    if strategy is None:
        strategy = "channel" if group_size in (None, -1) else "group"
    if strategy not in ("group", "channel", "tensor"):
        raise SourceError(f"{where} strategy {strategy!r} cannot be read; readable: group, channel, tensor")
    if strategy == "group" and (isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1):
        raise SourceError(f"{where} group_size is {group_size!r}; strategy group needs a positive number")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise SourceError(f"{where} symmetric is {symmetric!r}; expected true or false")
    return Scheme(bits, group_size if strategy == "group" else None, symmetric, str(layout))


def _activations(group: Mapping[str, Any], name: str) -> ActivationScheme | None:
    """What a config group says of inputs, with the library's defaults."""
    where = f"quantization_config, config_groups.{name}:"
    if group.get("output_activations") is not None:
        raise SourceError(f"{where} output_activations are set; quantized outputs cannot be read")
    return _scheme_of(group.get("input_activations"), f"{where} input_activations")


def _scheme_of(settings: Any, where: str) -> ActivationScheme | None:
    """Settings of activations, with the library's defaults; None when there are none."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping) or type(settings.get("num_bits", 8)) is not int:
        raise SourceError(f"{where} is {settings!r}; expected settings with a number of bits")
    return ActivationScheme(
        bits=settings.get("num_bits", 8),
        kind=str(settings.get("type", "int")),
        strategy=str(settings.get("strategy") or "tensor"),
        dynamic=bool(settings.get("dynamic", False)),
        symmetric=settings.get("symmetric", True) is True,
    )


def decode(tensors: Mapping[str, torch.Tensor], scheme: Scheme, site: str) -> DecodedWeight:
    """Codes, scales and zeros of one site; see `Reader.decode`."""
    codes = (
        _packed_codes(tensors, scheme, site)
        if scheme.checkpoint_format == PACKED
        else _int_codes(tensors, scheme, site)
    )
    out_features, in_features = codes.shape
    label = f"{site} ({scheme.label()}, out {out_features}, in {in_features})"
    if scheme.group_size is not None and in_features % scheme.group_size:
        raise SourceError(
            f"{label}: group size {scheme.group_size} does not divide {in_features} input features", "shape"
        )
    groups = 1 if scheme.group_size is None else in_features // scheme.group_size
    scale = tensors.get("weight_scale")
    if scale is not None and scheme.group_size is None and scale.numel() == 1:
        tensors = {**tensors, "weight_scale": scale.reshape(1, 1).expand(out_features, 1)}  # one scale for the tensor
    scale = tensor(tensors, "weight_scale", FLOATS, 2, site)
    expect(scale, (out_features, groups), "weight_scale", label)
    finite(scale, "weight_scale", site)
    zero = _zero(tensors, scheme, (out_features, groups), site, label)
    g_idx = tensor(tensors, "weight_g_idx", (torch.int32, torch.int64), 1, site) if "weight_g_idx" in tensors else None
    if g_idx is not None:
        expect(g_idx, (in_features,), "weight_g_idx", label)
    index = group_index(g_idx, in_features, scheme, site)
    return DecodedWeight(codes, scale.contiguous(), zero, index, scheme.bits)


def _packed_codes(tensors: Mapping[str, torch.Tensor], scheme: Scheme, site: str) -> torch.Tensor:
    packed = tensor(tensors, "weight_packed", (torch.int32,), 2, site)
    shape = tensor(tensors, "weight_shape", (torch.int64, torch.int32), 1, site)
    expect(shape, (2,), "weight_shape", site)
    out_features, in_features = (int(size) for size in shape)
    if out_features < 1 or in_features < 1:
        raise SourceError(f"{site}: weight_shape holds {[out_features, in_features]}, expected positive sizes", "shape")
    label = f"{site} ({scheme.label()}, out {out_features}, in {in_features})"
    expect(packed, (out_features, words_for(in_features, scheme.bits)), "weight_packed", label)
    return unpack_rows(packed, scheme.bits, in_features)


def _int_codes(tensors: Mapping[str, torch.Tensor], scheme: Scheme, site: str) -> torch.Tensor:
    weight = tensor(tensors, "weight", (torch.int8,), 2, site)
    return _unsigned(weight, scheme.bits, "weight", site)


def _unsigned(values: torch.Tensor, bits: int, suffix: str, site: str) -> torch.Tensor:
    """Signed int8 values as codes: value + 2^(bits-1)."""
    low, high = int(values.min()), int(values.max())
    half = 1 << (bits - 1)
    if low < -half or high >= half:
        raise SourceError(f"{site}: {suffix} holds {low} to {high}; {bits} bits reach from {-half} to {half - 1}")
    return (values.to(torch.int16) + half).to(torch.uint8)


def _zero(
    tensors: Mapping[str, torch.Tensor], scheme: Scheme, shape: tuple[int, int], site: str, label: str
) -> torch.Tensor:
    """uint8 [out, groups] from packed int32 (a stream along the output) or plain int8; the middle when symmetric."""
    middle = torch.full(shape, 1 << (scheme.bits - 1), dtype=torch.uint8)
    if scheme.symmetric and "weight_zero_point" not in tensors:
        return middle
    found = tensors.get("weight_zero_point")
    if found is not None and found.dtype == torch.int8 and found.numel() == 1 and shape[1] == 1:
        found = found.reshape(1, 1).expand(shape)  # one zero for the tensor
        tensors = {**tensors, "weight_zero_point": found}
    found = tensor(tensors, "weight_zero_point", (torch.int32, torch.int8), 2, site)
    if found.dtype == torch.int8:
        expect(found, shape, "weight_zero_point", label)
        zero = _unsigned(found, scheme.bits, "weight_zero_point", site)
    else:
        expect(found, (words_for(shape[0], scheme.bits), shape[1]), "weight_zero_point", label)
        zero = unpack_rows(found.t(), scheme.bits, shape[0]).t().contiguous()
    if scheme.symmetric and not torch.equal(zero, middle):
        values = sorted(set(zero.flatten().tolist()))
        raise SourceError(
            f"{site}: the config says symmetric (zero {int(middle[0, 0])}), the file holds {values[:8]}", "zeros"
        )
    return zero


# ------------------------------------------------------------------------------------------------ cache


def cache_scheme(config: Mapping[str, Any]) -> ActivationScheme | None:
    """``kv_cache_scheme``: how keys and values are kept."""
    return _scheme_of(config.get("kv_cache_scheme"), "quantization_config: kv_cache_scheme")


def cache_keys(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Attention modules are the prefixes that carry ``k_scale`` or ``v_scale``."""
    return sites_with(keys, CACHED, CACHED[:2])


def decode_cache(
    tensors: Mapping[str, torch.Tensor], scheme: ActivationScheme, module: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x ~ q * scale`` of keys and values; see `CacheReader.decode`. Scales are [], [1], [heads] or [heads, 1, 1]."""
    found = []
    for suffix in CACHED[:2]:
        scale = tensors.get(suffix)
        if scale is None:
            raise SourceError(f"{module}: {suffix} is missing; present: {', '.join(sorted(tensors))}", "missing")
        shape = list(scale.shape)
        per_head = scheme.strategy == "attn_head"
        if scale.dtype not in FLOATS or scale.numel() != max(shape, default=1) or not (per_head or scale.numel() == 1):
            wanted = "[heads, 1, 1]" if per_head else "[1]"
            raise SourceError(f"{module}: {suffix} is {scale.dtype} {shape}; expected floats {wanted}", "shape")
        finite(scale, suffix, module)
        if not bool((scale > 0).all()):
            raise SourceError(f"{module}: {suffix} holds {float(scale.min()):.3g}; scales are positive", "zero-scale")
        zero = tensors.get(f"{suffix[0]}_zero_point")
        if scheme.symmetric and zero is not None and bool((zero != 0).any()):
            raise SourceError(f"{module}: kv_cache_scheme is symmetric, and {suffix[0]}_zero_point is not 0", "zeros")
        found.append(scale.reshape(-1))
    return found[0], found[1]


READER = Reader(
    quant_method="compressed-tensors",
    group_keys=group_keys,
    scheme=scheme,
    decode=decode,
    cache=CacheReader(cache_scheme, cache_keys, decode_cache),
)
