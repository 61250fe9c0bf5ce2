"""transformers' quantizer for checkpoints that readers here know: gptq, awq, auto-round, compressed-tensors.

transformers asks one class for each ``quant_method``, and has its own for these, which need GPTQModel, optimum or
compressed-tensors and, on a CPU, dequantize or run slowly. `register` puts ours in their place in this process, for
what it can run; everything else (quantizing while loading, FP8, other variants) still goes to the original classes.
Importing quantforge changes nothing in transformers: ``import quantforge.transformers``, or calling `register`, does.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantforge.errors import SourceError
from quantforge.kernels.linear import Activations
from quantforge.model.packed import PackedCheckpoint, open_any
from quantforge.readers import reader_names
from quantforge.readers.compressed_tensors import PACKED, UNPACKED
from quantforge.runtime.packing import encoded, fill, place, unexpected_keys

_originals: dict[str, tuple[Any, Any]] = {}
"""What transformers had before `register`: quant_method -> (config class, quantizer class)."""


class PackedConfig(QuantizationConfigMixin):
    """A checkpoint's ``quantization_config``, kept word for word, so that saving writes what was loaded."""

    def __init__(self, settings: Mapping[str, Any], activations: Activations = "float") -> None:
        self.quant_method = settings["quant_method"]
        self.settings = dict(settings)
        self.activations = activations

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As the base class has it."""
        found = cls(config_dict)
        return (found, kwargs) if return_unused_kwargs else found

    def to_dict(self) -> dict[str, Any]:
        """The settings as they were read."""
        return dict(self.settings)

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: there are no defaults to leave out."""
        return self.to_dict()

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.to_json_string()}"


class PackedQuantizer(HfQuantizer):
    """Loads a quantized checkpoint into `PackedLinear` layers, which no float matrix is ever made for."""

    requires_calibration = True  # it loads what is quantized, and quantizes nothing

    def __init__(self, quantization_config: PackedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.activations: Activations = quantization_config.activations
        self.packed: PackedCheckpoint | None = None
        self.places: dict[str, str] = {}

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise SourceError("a packed checkpoint is loaded from its files; from_pretrained was given none")
        source = open_any(Path(checkpoint_files[0]).parent)
        if not isinstance(source, PackedCheckpoint):
            raise SourceError(f"{source.path}: nothing is packed")
        self.packed = source
        self.places = place(model, source, self.activations)
        owner: Any = model
        ignored = set(owner._keys_to_ignore_on_load_unexpected or ())
        owner._keys_to_ignore_on_load_unexpected = ignored | unexpected_keys(source, self.places)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        assert self.packed is not None
        devices = _devices(model, list(self.places.values()))
        fill(model, self.packed, self.places, devices)
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
        """Everything as the checkpoint holds it: packed tensors are packed as its format has them."""
        assert self.packed is not None
        inside = tuple(f"{name}." for name in self.places.values())
        own = {f"{name}.bias" for name in self.places.values()}
        state = {key: t for key, t in model.state_dict().items() if not key.startswith(inside) or key in own}
        return state | encoded(model, self.packed, self.places), {}

    def is_serializable(self, **kwargs: Any) -> bool:
        """Checkpoints are saved in the format they were loaded from."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed weights have no gradient; their inputs do."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The operators have shapes without values."""
        return True


def _devices(model: nn.Module, names: list[str]) -> dict[str, torch.device]:
    """Where each module goes: as the device map says, by the longest part of its name; else where the model is."""
    asked: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {}
    rest = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    found = {}
    for name in names:
        parts = [part for part in asked if part == "" or name == part or name.startswith(f"{part}.")]
        where = asked[max(parts, key=len)] if parts else rest
        if where == "disk":
            raise SourceError(f"{name}: packed layers cannot be kept on disk; give another device_map")
        found[name] = torch.device(where)
    return found


# ------------------------------------------------------------------------------------------------ registering


def register() -> None:
    """From now on ``from_pretrained`` runs checkpoints that readers here know on their packed weights, in this process.

    ``quantization_config=`` of another class is refused by transformers beside such a checkpoint; `unregister` first.
    """
    configs, quantizers = _tables()
    for method in reader_names():
        if method not in _originals:
            _originals[method] = (configs.get(method), quantizers.get(method))
            configs[method] = _config_class(configs.get(method), "float")
            quantizers[method] = _quantizer_class(quantizers.get(method))


def unregister() -> None:
    """Give transformers its own classes back."""
    while _originals:
        method, originals = _originals.popitem()
        for table, original in zip(_tables(), originals, strict=True):
            if original is None:
                table.pop(method, None)
            else:
                table[method] = original


@contextmanager
def registered(activations: Activations) -> Iterator[None]:
    """Registered while this is open, with another default for `activations`; as before afterwards."""
    configs, quantizers = _tables()
    before = dict(configs), dict(quantizers)
    try:
        for method in reader_names():
            configs[method] = _config_class(None, activations)
            quantizers[method] = _quantizer_class(None)
        yield
    finally:
        for table, old in zip((configs, quantizers), before, strict=True):
            table.clear()
            table.update(old)


def _tables() -> tuple[dict[str, Any], dict[str, Any]]:
    """transformers' classes by ``quant_method``: of configs, of quantizers."""
    configs: Any = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    quantizers: Any = auto.AUTO_QUANTIZER_MAPPING
    return configs, quantizers


def _config_class(original: Any, activations: Activations) -> Any:
    """What stands for a config class: ours for what can be run packed, else the original."""

    class Chosen(PackedConfig):
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
            if original is not None and not can_run(config_dict):
                return original.from_dict(config_dict, return_unused_kwargs, **kwargs)
            found = PackedConfig(config_dict, activations)
            return (found, kwargs) if return_unused_kwargs else found

    return Chosen


def _quantizer_class(original: Any) -> Callable[..., Any]:
    def choose(config: Any, **kwargs: Any) -> Any:
        ours = isinstance(config, PackedConfig)
        return PackedQuantizer(config, **kwargs) if ours or original is None else original(config, **kwargs)

    return choose


def can_run(settings: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` is of a kind that readers here know, by its method and layout alone."""
    if settings.get("quant_method") not in reader_names():
        return False
    if settings["quant_method"] != "compressed-tensors":
        return True
    groups = settings.get("config_groups")
    layouts = {settings.get("format")}
    if isinstance(groups, Mapping):
        layouts = {g.get("format") or settings.get("format") for g in groups.values() if isinstance(g, Mapping)}
    return bool(layouts) and layouts <= {PACKED, *UNPACKED}
