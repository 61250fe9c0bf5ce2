"""Weights in pickle files, read only when a user asks for it and only by torch's restricted unpickler."""

import pickle
import struct
import zipfile
from pathlib import Path

import torch

from quantforge.errors import SourceError
from quantforge.model.shards import DTYPE_NAMES, TensorInfo, opened

PICKLE_INDEX_FILE = "pytorch_model.bin.index.json"
PICKLE_SINGLE_FILE = "pytorch_model.bin"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")


def unpickle(full: Path) -> dict[str, torch.Tensor]:
    """A pickled state dict, through torch's unpickler that builds tensors and plain containers only."""
    with opened(full):
        pass  # refuses what may not be read
    try:
        data = torch.load(full, map_location="cpu", mmap=zipfile.is_zipfile(full), weights_only=True)
    except (
        pickle.UnpicklingError, struct.error, EOFError, OSError, RuntimeError, ValueError, LookupError, TypeError,
        AttributeError, AssertionError, ImportError, ArithmeticError,
    ) as error:  # fmt: skip
        # torch wraps the reason in advice to switch the protection off; the exception underneath has it plain
        reason = str(error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error)
        reason = reason.strip().partition("\n")[0] or type(error).__name__
        size = full.stat().st_size if full.exists() else 0
        raise SourceError(
            f"{full} ({size} bytes) is damaged, or holds more than tensors and is refused: {reason[:300]}"
        ) from error
    if not isinstance(data, dict):
        raise SourceError(f"{full} holds a {type(data).__name__}, not a dict of names to tensors")
    for key, value in data.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise SourceError(f"{full} is no dict of names to tensors: {key!r} is a {type(value).__name__}")
    return {key: tensor.detach() for key, tensor in data.items()}


def info_of_tensor(key: str, tensor: torch.Tensor, full: Path) -> TensorInfo:
    """What a header would say about a tensor read from a pickle."""
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
        raise SourceError(f"{full}: {key} is {tensor.dtype}, {tensor.layout}, which is not supported")
    total_bytes = tensor.numel() * tensor.element_size()
    return TensorInfo(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), full.name, 0, total_bytes)
