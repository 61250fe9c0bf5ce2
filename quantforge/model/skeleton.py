"""The model's module tree without weights, and which checkpoint tensor fills which parameter."""

import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantforge.errors import NumericsError, SourceError
from quantforge.model.source import TensorSource, read_config

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SIZE_NAMES = re.compile(r"(size|dim|layers?|heads|experts|rank|positions|embeddings|embd|inner|model|depth)$")
LARGEST_SIZE = 1 << 26
MOST_LAYERS = 10_000


def transformers_version() -> str:
    """Of the library whose modules compute the layers."""
    import transformers

    return transformers.__version__


def build_skeleton(
    path: Path, *, trust_remote_code: bool = False, only_shapes: bool = False, tensors: int = MOST_LAYERS
) -> nn.Module:
    """The float32 model of a directory's config.json, on the meta device, in eval mode.

    Buffers that are computed, not stored, are real, unless `only_shapes`: then nothing is allocated at all. `tensors`
    is how many the checkpoint holds, where there is one: no fewer than layers.
    """
    import transformers
    from accelerate import init_empty_weights
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if found := list(implausible_sizes(read_config(path), tensors)):
        raise SourceError(f"{path / 'config.json'} describes no model that could be built: {', '.join(found)}")
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        if getattr(config, "is_encoder_decoder", False):
            raise SourceError(f"{path} is an encoder-decoder model; only decoder-only language models are handled")
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        named = (getattr(config, "architectures", None) or [""])[0]
        known = getattr(transformers, named, None) if not getattr(config, "auto_map", None) else None
        with init_empty_weights(include_buffers=only_shapes):
            if known is not None and named.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
                model = known._from_config(copy.deepcopy(config), dtype=torch.float32)
            else:
                model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    copy.deepcopy(config), trust_remote_code=trust_remote_code, dtype=torch.float32
                )
    except (
        ValueError, LookupError, ImportError, AttributeError, TypeError, OSError, RuntimeError, ArithmeticError,
        AssertionError, StrictDataclassError,
    ) as error:  # fmt: skip
        hint = "" if trust_remote_code else " (a model with its own code needs --trust-remote-code)"
        raise SourceError(f"{path}: transformers cannot build this model{hint}: {error}") from error
    built: nn.Module = model.float().eval()
    built.tie_weights()  # type: ignore[operator]
    return built.requires_grad_(False)


def implausible_sizes(config: Mapping[str, Any], tensors: int) -> Iterator[str]:
    """Numbers of a config that no model of so many tensors can have; building it would take all time and memory.

    Every layer has a tensor at least, and no dimension or position comes close to the limit.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from implausible_sizes(value, tensors)
        elif type(value) is int and key in LAYER_COUNTS and value > tensors:
            yield f"{key} is {value}, with {tensors} tensors at most"
        elif type(value) is int and SIZE_NAMES.search(key) and abs(value) > LARGEST_SIZE:
            yield f"{key} is {value}"


def is_conv1d(module: nn.Module) -> bool:
    """True for GPT-2's Conv1D, a linear layer that stores its weight [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def settle_ties(model: nn.Module, source: TensorSource, keys: "KeyMap") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Decide what to do where the config ties two parameters and the checkpoint holds both.

    Equal tensors are one: the second key is a duplicate. Different ones are kept apart, as transformers does, whatever
    the config says. Returns (duplicate checkpoint keys, names of parameters that were untied).
    """
    tied: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)  # type: ignore[operator]
    duplicates: list[str] = []
    untied: list[str] = []
    for target, origin in tied.items():
        if target not in keys.plain or origin not in keys.plain:
            continue
        key, other = keys.plain[target], keys.plain[origin]
        if source.is_packed(key) or source.is_packed(other) or not torch.equal(source.read(key), source.read(other)):
            untied.append(target)
        else:
            duplicates.append(key)
    if untied:
        config: Any = model.config
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        for name in untied:
            owner, _, leaf = name.rpartition(".")
            parameters = model.get_submodule(owner)._parameters
            parameters[leaf] = nn.Parameter(torch.empty_like(model.get_parameter(name)), requires_grad=False)
    return tuple(duplicates), tuple(untied)


def find_stack(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The decoder layers: the largest ModuleList, of the decoder if there is one, of num_hidden_layers parts."""
    config: Any = model.config
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    getter: Any = getattr(model, "get_decoder", None)
    decoder = getter() if getter is not None else None
    language = {id(module) for module in decoder.modules()} if isinstance(decoder, nn.Module) else set()
    candidates = [
        (id(module) in language, sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and any(p.ndim >= 2 for p in module.parameters())
    ]
    if not candidates:
        raise SourceError(f"{type(model).__name__} has no module list of {count} decoder layers")
    *_, name, stack = max(candidates, key=lambda candidate: candidate[:2])
    return name, stack


@dataclass(frozen=True)
class KeyMap:
    """Which checkpoint tensor belongs where.

    Attributes:
        plain: parameter or buffer name -> the checkpoint key that holds it as it is.
        converted: checkpoint keys that transformers must convert (experts stored apart, for example), by the module
            name they turn into.
        mapping: transformers' own conversion rules for this model.
    """

    plain: dict[str, str]
    converted: dict[str, list[str]]
    mapping: list[Any]

    def keys_below(self, prefix: str) -> tuple[dict[str, str], list[str]]:
        """The part of the map whose targets start with `prefix`."""
        plain = {target: key for target, key in self.plain.items() if target.startswith(prefix)}
        converted = [key for target, keys in self.converted.items() if target.startswith(prefix) for key in keys]
        return plain, converted

    def keys_outside(self, prefix: str) -> tuple[dict[str, str], list[str]]:
        """The part of the map whose targets do not start with `prefix`."""
        plain = {target: key for target, key in self.plain.items() if not target.startswith(prefix)}
        converted = [key for target, keys in self.converted.items() if not target.startswith(prefix) for key in keys]
        return plain, converted


def map_keys(model: nn.Module, keys: list[str]) -> KeyMap:
    """Match checkpoint keys with parameters through transformers' renaming and conversion rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    state: dict[str, Any] = dict(model.state_dict())
    prefix: str = getattr(model, "base_model_prefix", "")
    plain: dict[str, str] = {}
    converted: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if pattern is not None and key not in state:
            converted[target].append(key)
        elif target in state:
            plain[target] = key
    return KeyMap(plain, dict(converted), mapping)


def fill(
    model: nn.Module,
    source: TensorSource,
    plain: Mapping[str, str],
    converted: list[str],
    mapping: list[Any],
    device: torch.device,
) -> None:
    """Read tensors into the model as float32; NumericsError on a non-finite weight, SourceError on a wrong shape."""
    for target, key in plain.items():
        owner_name, _, leaf = target.rpartition(".")
        owner = model.get_submodule(owner_name)
        tensor = _finite(source.read(key), key, source)
        if source.is_packed(key) and is_conv1d(owner):
            tensor = tensor.t().contiguous()  # packed formats hold [out, in]; Conv1D computes with [in, out]
        old = owner._parameters.get(leaf, owner._buffers.get(leaf))
        if old is not None and old.shape != tensor.shape:
            raise SourceError(
                f"{source.path}: {key} is {list(tensor.shape)}, the model that config.json describes needs "
                f"{list(old.shape)}"
            )
        tensor = tensor.to(device=device, dtype=torch.float32 if tensor.is_floating_point() else None)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor
    if converted:
        _convert_and_fill(model, source, converted, mapping, device)


def _convert_and_fill(
    model: nn.Module, source: TensorSource, keys: list[str], mapping: list[Any], device: torch.device
) -> None:
    """Let transformers convert checkpoint tensors whose layout differs from the modules'; done nowhere else."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    tensors = {key: _finite(source.read(key), key, source) for key in keys}
    rules = LoadStateDictConfig(weight_mapping=copy.deepcopy(mapping), dtype=torch.float32)
    convert_and_load_state_dict_in_model(model, tensors, rules)  # type: ignore[arg-type]
    if device.type != "cpu":
        for parameter in model.parameters():
            if parameter.device.type == "cpu":
                parameter.data = parameter.data.to(device)


def _finite(tensor: torch.Tensor, key: str, source: TensorSource) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise NumericsError(f"{source.path}: {key} has {bad} NaN or infinite values of {tensor.numel()}")
    return tensor
