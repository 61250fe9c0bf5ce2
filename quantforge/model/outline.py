"""A model that is planned for without its weights: what a checkpoint would hold, from config.json alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantforge.model.shards import DTYPE_NAMES, INDEX_FILE, SINGLE_FILE, TensorInfo
from quantforge.model.skeleton import build_skeleton
from quantforge.model.source import Checkpoint, config_dtype, open_checkpoint, read_config, resolve_model
from quantforge.model.streamed import StreamedModel

CONFIG = "config.json"
NO_FILE = ""


def outline_model(
    model: str, device: str, *, trust_remote_code: bool = False, allow_pickle: bool = False
) -> StreamedModel:
    """The model over its headers where there are any, else over what its config describes; no weights are read.

    `model` is a directory, a config.json, or a hub id, of which everything but the weights is downloaded. Nothing is
    allocated for weights or buffers, so the result can be planned with and not be run.
    """
    file = Path(model)
    alone = file.name == CONFIG and file.is_file()
    path = file.parent if alone else resolve_model(model, allow_pickle=allow_pickle, weights=False)
    skeleton = build_skeleton(path, trust_remote_code=trust_remote_code, only_shapes=True)
    if alone or not has_weights(path, allow_pickle):
        config = read_config(path)
        source = Checkpoint(path, config, _tensors(skeleton, config))
    else:
        source = open_checkpoint(path, allow_pickle=allow_pickle)
    return StreamedModel(source, device, trust_remote_code=trust_remote_code, skeleton=skeleton)


def has_weights(path: Path, allow_pickle: bool = False) -> bool:
    """Whether a directory holds weights, whole or not."""
    patterns = ("*.safetensors", *(["pytorch_model*.bin"] if allow_pickle else []))
    return any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE)) or any(
        next(path.glob(pattern), None) is not None for pattern in patterns
    )


def is_outline(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is described by its config alone."""
    return bool(checkpoint.tensors) and all(info.file == NO_FILE for info in checkpoint.tensors.values())


def _tensors(skeleton: nn.Module, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Every tensor the model would be saved with, tied ones once, floats in the config's dtype."""
    dtype = getattr(torch, config_dtype(config), torch.float32)
    stored = {*dict(skeleton.named_parameters()), *dict(skeleton.named_buffers())}
    found: dict[str, TensorInfo] = {}
    for name, tensor in skeleton.state_dict().items():
        if name in stored:
            own = dtype if tensor.is_floating_point() else tensor.dtype
            shape = tuple(tensor.shape)
            found[name] = TensorInfo(DTYPE_NAMES[own], shape, NO_FILE, 0, tensor.numel() * own.itemsize)
    return found
