"""The tensors of a checkpoint against the model that its config describes."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quantforge.errors import SourceError
from quantforge.model.packed import PackedCheckpoint, packed_checkpoint
from quantforge.model.shards import DTYPES
from quantforge.model.sites import output_head
from quantforge.model.skeleton import KeyMap, build_skeleton, find_stack, is_conv1d, map_keys
from quantforge.model.source import TensorSource
from quantforge.pipeline.examine.config import Quantization
from quantforge.pipeline.examine.files import Files
from quantforge.pipeline.examine.findings import Finding, error, listed, same_bytes, warning
from quantforge.pipeline.examine.sites import Site
from quantforge.pipeline.serving import caching_layers


@dataclass(frozen=True)
class Described:
    """The model of a config, without weights, and which tensor belongs to which of its parameters."""

    files: Files
    source: TensorSource
    sites: Mapping[str, Site]
    model: nn.Module
    keys: KeyMap
    stack: str
    layers: int

    def is_below(self, name: str) -> bool:
        return name.startswith(f"{self.stack}.")

    @property
    def stored_prefix(self) -> str:
        """What goes before the number of a layer in the checkpoint's names."""
        for target, key in self.keys.plain.items():
            rest = target.removeprefix(f"{self.stack}.")
            if rest != target and key.endswith(f".{rest}"):
                return key.removesuffix(rest)
        return f"{self.stack}."


def check_model(
    files: Files, quantization: Quantization, sites: Mapping[str, Site], *, trust_remote_code: bool = False
) -> list[Finding]:
    """Parameters without a tensor, tensors without a parameter, shapes, layers, ties, ignored modules."""
    source: TensorSource = files.checkpoint
    if quantization.reader is not None and quantization.sites:
        source = seen_as_float(files, quantization, sites)
    try:
        model = build_skeleton(files.path, trust_remote_code=trust_remote_code, tensors=len(source.keys()))
        stack, layers = find_stack(model)
    except SourceError as fault:
        return [error("model", "config.json", str(fault))]
    keys = map_keys(model, source.keys())
    described = Described(files, source, sites, model, keys, stack, len(layers))
    findings = [*_misfits(described), *_missing(described), *_unused(described), *_ties(described)]
    if quantization.reader is not None and quantization.settings is not None and files.whole:
        findings += _unlisted(described, quantization)
    return [*findings, *_cache(described)]


def seen_as_float(files: Files, quantization: Quantization, sites: Mapping[str, Site]) -> PackedCheckpoint:
    """The checkpoint as far as it could be read; what its config says of a cache only where that can be meant."""
    assert quantization.reader is not None and quantization.settings is not None
    schemes = {name: site.scheme for name, site in sites.items()}
    parts = (files.checkpoint, quantization.reader, quantization.sites, schemes)
    try:
        return packed_checkpoint(*parts, quantization.settings)
    except SourceError:  # a finding already
        return PackedCheckpoint(*parts)


def _misfits(described: Described) -> Iterator[Finding]:
    """Tensors whose shape or dtype is not what the model needs."""
    state = described.model.state_dict()
    for target, key in described.keys.plain.items():
        needed = tuple(state[target].shape)
        if described.source.is_packed(key):
            site = described.sites.get(key.removesuffix(".weight"))
            if site is None:
                continue  # it could not be decoded
            owner = described.model.get_submodule(target.rpartition(".")[0])
            found: tuple[int, ...] = site.shape[::-1] if is_conv1d(owner) else site.shape
        else:
            info = described.files.checkpoint.tensors[key]
            found = info.shape
            if state[target].is_floating_point() and not DTYPES[info.dtype].is_floating_point:
                yield error("dtype", key, f"{key} is {info.dtype}, the model needs a floating point dtype")
        if found != needed:
            yield error("model-shape", key, f"{key} is {list(found)}, the model of config.json needs {list(needed)}")


def _missing(described: Described) -> Iterator[Finding]:
    """Parameters without a tensor; a layer that has none at all is one finding."""
    keys, layers = described.keys, described.layers
    parents = {target.rpartition(".")[0] for target in keys.converted}
    filled = keys.plain.keys() | keys.converted.keys()
    aliases: dict[int, list[str]] = defaultdict(list)  # tied parameters are one object with several names
    for name, parameter in described.model.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
    missing = [names[0] for names in aliases.values() if not filled & set(names)]
    missing = [name for name in missing if name.rpartition(".")[0] not in parents]
    present = {_layer_of(name, described) for name in filled}
    empty = [layer for layer in range(layers) if layer not in present]
    if empty:
        text = f"config.json says {layers} layers, and there are no tensors of {listed(map(str, empty))}"
        yield error(
            "layers", f"{described.stack}.{empty[0]}", f"{text}: num_hidden_layers is wrong, or a shard is lost"
        )
    head = output_head(described.model)
    for name in missing:
        if _layer_of(name, described) in empty:
            continue
        if head is not None and name.startswith(f"{head}."):
            text = f"tie_word_embeddings is false and there is no {name}: restore it, or, if the head is the embedding,"
            yield error("head-missing", name, f"{text} set tie_word_embeddings to true")
        else:
            yield error(
                "tensor-missing", name, f"the model of config.json has a parameter {name}, the checkpoint no tensor"
            )


def _unused(described: Described) -> Iterator[Finding]:
    """Tensors without a parameter: of layers beyond the last one, or of nothing."""
    keys = described.keys
    used = set(keys.plain.values()).union(*keys.converted.values())
    ignored = getattr(described.model, "_keys_to_ignore_on_load_unexpected", None) or []
    stored = described.source.keys()
    extra = [key for key in stored if key not in used and not key.endswith("rotary_emb.inv_freq")]
    extra = [key for key in extra if not any(re.search(pattern, key) for pattern in ignored)]
    numbers = {key: _stored_layer(key, described) for key in extra}
    config = described.files.checkpoint.config
    text = config.get("text_config")
    drafts = (text if isinstance(text, dict) else config).get("num_nextn_predict_layers")
    last = described.layers + (drafts if type(drafts) is int else 0)
    beyond = sorted({number for number in numbers.values() if number is not None and number >= last})
    if beyond:
        where = f"{described.stored_prefix}{beyond[0]}"
        says = f"config.json says {described.layers} layers, and there are tensors of layer {listed(map(str, beyond))}"
        yield error("layers", where, f"{says}, which no loader would use: num_hidden_layers is wrong")
    for key, number in numbers.items():
        if number is None or number < described.layers:
            yield warning(
                "tensor-unused", key, f"{key} belongs to no parameter of the model that config.json describes"
            )


def _ties(described: Described) -> Iterator[Finding]:
    """Parameters that config.json ties, and that are stored both."""
    tied: dict[str, str] = described.model.get_expanded_tied_weights_keys(all_submodels=True)  # type: ignore[operator]
    for target, origin in tied.items():
        key, other = described.keys.plain.get(target), described.keys.plain.get(origin)
        if key is None or other is None:
            continue
        says = f"config.json ties {key} to {other}"
        if described.source.is_packed(key) or described.source.is_packed(other):
            text = f"{says}, and it is packed; loaders differ in which one they use: set tie_word_embeddings to false"
            yield error("head-untied", key, text)
        elif not same_bytes(described.files.checkpoint.read(key), described.files.checkpoint.read(other)):
            text = f"{says}, and the two hold different values: remove it, or set tie_word_embeddings to false"
            yield error("head-untied", key, text)
        else:
            size = described.files.checkpoint.tensors[key].total_bytes
            text = f"{says} and holds both: {size:,} bytes too many, and some servers stop at it; --fix drops it"
            yield warning("head-duplicate", key, text)


def _unlisted(described: Described, quantization: Quantization) -> Iterator[Finding]:
    """Matrices in floating point that the quantization_config says are packed."""
    assert quantization.reader is not None and quantization.settings is not None
    strict = quantization.method == "compressed-tensors"
    for name, module in described.model.named_modules():
        key = described.keys.plain.get(f"{name}.weight")
        if key is None or described.source.is_packed(key) or not (isinstance(module, nn.Linear) or is_conv1d(module)):
            continue
        names = {name, key.removesuffix(".weight")}
        if not strict and (not described.is_below(name) or name.rpartition(".")[2] in ("gate", "router")):
            continue
        try:
            for one in names:
                quantization.reader.scheme(quantization.settings, one)
        except SourceError:
            continue  # left alone, as it should be
        text = f"{key} is in floating point, and quantization_config does not leave it alone"
        if strict:
            yield error("unlisted", key, f"{text}: loaders look for packed tensors; add it to ignore")
        else:
            yield warning("unlisted", key, f"{text}: some loaders look for packed tensors; add a rule to dynamic")


def _cache(described: Described) -> Iterator[Finding]:
    """Layers without the scales that a static kv_cache_scheme is about."""
    source = described.source
    scheme = source.cache_scheme if isinstance(source, PackedCheckpoint) else None
    if not isinstance(source, PackedCheckpoint) or scheme is None or scheme.dynamic:
        return
    config: Any = described.model.config
    present = {_stored_layer(f"{name}.", described) for name in source.cache}
    lacking = [layer for layer in caching_layers(config.get_text_config()) if layer not in present]
    if lacking:
        text = f"kv_cache_scheme is static, and there is no k_scale of layer {listed(map(str, lacking))}"
        yield error("cache-scale", f"{described.stored_prefix}{lacking[0]}", f"{text}: servers would take 1 for it")


def _layer_of(name: str, described: Described) -> int | None:
    if not described.is_below(name):
        return None
    number = name[len(described.stack) + 1 :].partition(".")[0]
    return int(number) if number.isdecimal() else None


def _stored_layer(key: str, described: Described) -> int | None:
    number = key.removeprefix(described.stored_prefix).partition(".")[0]
    return int(number) if key.startswith(described.stored_prefix) and re.fullmatch("[0-9]{1,6}", number) else None
