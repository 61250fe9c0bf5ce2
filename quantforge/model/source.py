"""A checkpoint directory as named tensors, read lazily and without memory mapping.

Only safetensors is read by default. Every header is checked before the first tensor is: a missing or truncated shard,
an index that points outside the directory or names a tensor no shard holds, is an error that says so.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import torch

from quantforge.errors import SourceError
from quantforge.model.pickles import PICKLE_INDEX_FILE, PICKLE_SINGLE_FILE, PICKLE_SUFFIXES, info_of_tensor, unpickle
from quantforge.model.shards import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    TensorInfo,
    collect,
    file_names,
    files_of_index,
    opened,
    read_header,
    read_json,
    read_weight_map,
    require_places,
)

COPY_CHUNK_BYTES = 16 << 20
FINGERPRINT_SAMPLES = 16
FINGERPRINT_SAMPLE_BYTES = 1 << 16


class TensorSource(Protocol):
    """Named tensors of one checkpoint; implemented by `Checkpoint` and by `packed.PackedCheckpoint`."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def keys(self) -> list[str]: ...
    def read(self, key: str) -> torch.Tensor: ...
    def is_packed(self, key: str) -> bool: ...


@dataclass(frozen=True)
class Checkpoint:
    """A local checkpoint directory. Build it with `open_checkpoint`.

    Attributes:
        path: the directory.
        config: config.json as a dict.
        tensors: every tensor by key, in the order of the files.
        pickled: tensors read from a pickle file by explicit opt-in (kept in memory maps by torch), else None.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    pickled: dict[str, torch.Tensor] | None = None

    def keys(self) -> list[str]:
        return list(self.tensors)

    def is_packed(self, key: str) -> bool:
        return False

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.total_bytes for info in self.tensors.values())

    def read(self, key: str) -> torch.Tensor:
        """One tensor in its stored dtype, in freshly allocated memory."""
        info = self.tensors[key]
        if self.pickled is not None:
            return self.pickled[key].clone()
        buffer = torch.empty(info.total_bytes, dtype=torch.uint8)
        with opened(self.path / info.file) as handle:
            handle.seek(info.start)
            got = handle.readinto(buffer.numpy().data) if info.total_bytes else 0
        if got != info.total_bytes:
            raise SourceError(f"{self.path / info.file}: {key} ends after {got} of {info.total_bytes} bytes")
        return buffer.view(DTYPES[info.dtype]).reshape(info.shape)

    def copy_bytes(self, key: str, target: BinaryIO) -> None:
        """Append a tensor's bytes to an open file, in bounded memory."""
        for chunk in self._chunks(key):
            target.write(chunk)

    def _chunks(self, key: str) -> Iterator[bytes]:
        info = self.tensors[key]
        if self.pickled is not None:
            yield self.pickled[key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return
        with opened(self.path / info.file) as handle:
            handle.seek(info.start)
            left = info.total_bytes
            while left:
                chunk = handle.read(min(left, COPY_CHUNK_BYTES))
                if not chunk:
                    raise SourceError(f"{self.path / info.file}: {key} ends {left} bytes early")
                left -= len(chunk)
                yield chunk

    def file_times(self) -> dict[str, list[int]]:
        """[bytes, modification time in ns] of every weight file: tells an edited file that `fingerprint` would not."""
        files = sorted({info.file for info in self.tensors.values()})
        return {file: [(stat := (self.path / file).stat()).st_size, stat.st_mtime_ns] for file in files}

    def fingerprint(self) -> str:
        """A hash of the config, of every tensor's name, dtype, shape and place, and of samples of every weight file."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for key, info in self.tensors.items():
            digest.update(f"{key}|{info}".encode())
        for file in sorted({info.file for info in self.tensors.values()}):
            with opened(self.path / file) as handle:
                size = os.fstat(handle.fileno()).st_size
                for sample in range(FINGERPRINT_SAMPLES):
                    handle.seek(sample * max(0, size - FINGERPRINT_SAMPLE_BYTES) // (FINGERPRINT_SAMPLES - 1))
                    digest.update(handle.read(FINGERPRINT_SAMPLE_BYTES))
        return digest.hexdigest()


def open_checkpoint(model: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Open a local directory or a hub id; checks every header, reads no weights.

    Where a directory holds several kinds of weights the choice is that of transformers: one safetensors file, then an
    index of several, then pickles. Raises SourceError for anything missing, truncated, hostile or inconsistent, and for
    pickle weights unless `allow_pickle` is set.
    """
    path = resolve_model(model, allow_pickle=allow_pickle)
    config = read_config(path)
    if (path / SINGLE_FILE).is_file():
        tensors = collect(path, [(SINGLE_FILE, read_header(path / SINGLE_FILE))])
    elif (path / INDEX_FILE).is_file():
        weight_map = read_weight_map(path / INDEX_FILE)
        tensors = collect(
            path, [(file, read_header(path / file)) for file in files_of_index(path / INDEX_FILE, weight_map)]
        )
        require_places(path / INDEX_FILE, weight_map, tensors)
    else:
        return _open_pickled(path, config, allow_pickle)
    return Checkpoint(path, config, tensors)


def resolve_model(model: str | Path, *, allow_pickle: bool = False, weights: bool = True) -> Path:
    """The local directory of a model: the directory itself, or a hub id's snapshot, with its `weights` or not."""
    path = Path(model)
    try:
        if path.is_dir():
            return path
        is_there = path.exists()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise SourceError(f"{model} cannot be read: {error.strerror}") from error
    if is_there:
        raise SourceError(f"{path} is a file; MODEL is a checkpoint directory or a hub id such as org/name")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) or str(model).startswith("."):
        raise SourceError(f"no checkpoint directory at {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    network_errors = cast(type[Exception], HfHubHTTPError.__mro__[1])  # of whichever HTTP library the hub client uses
    patterns = ["*.json", "*.jinja", "*.py", "*.model", "*.txt", "*.tiktoken", *(["*.safetensors"] if weights else [])]
    if allow_pickle and weights:
        patterns.append("pytorch_model*.bin")
    try:
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except (HFValidationError, OSError, network_errors) as error:
        raise SourceError(
            f"no checkpoint directory at {model}, and the hub has no reachable model of that id "
            f"({type(error).__name__}). Check the path, or download the model first and give its directory."
        ) from error


def read_config(path: Path) -> dict[str, Any]:
    """config.json as a dict; SourceError when it is absent, not JSON, or names no architecture."""
    config = read_json(path / "config.json")
    if not config.get("architectures") and not config.get("model_type"):
        raise SourceError(
            f"{path / 'config.json'} names neither architectures nor model_type: not a model's config", "config"
        )
    return config


def config_dtype(config: Mapping[str, Any]) -> str:
    """The dtype a config names for its weights, such as ``bfloat16``; ``float32`` where it names none."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    named = (str(c[key]) for c in (config, text) for key in ("dtype", "torch_dtype") if c.get(key))
    return next(named, "float32")


def _open_pickled(path: Path, config: dict[str, Any], allow_pickle: bool) -> Checkpoint:
    """The checkpoint when it has no safetensors; torch keeps the tensors in memory maps where the files allow it."""
    pickles = [name for name in file_names(path) if name.endswith(PICKLE_SUFFIXES)]
    indexed = (path / PICKLE_INDEX_FILE).is_file()
    if not indexed and not (path / PICKLE_SINGLE_FILE).is_file():
        raise SourceError(
            f"{path} holds no {SINGLE_FILE} and no {INDEX_FILE}" + (f"; found {pickles}" if pickles else "")
        )
    if not allow_pickle:
        raise SourceError(
            f"{path} holds pickle weights ({', '.join(pickles[:3])}), which can run code when loaded. Convert them to "
            "safetensors, or pass --allow-pickle to read them with torch's restricted unpickler."
        )
    weight_map = read_weight_map(path / PICKLE_INDEX_FILE) if indexed else {}
    files = files_of_index(path / PICKLE_INDEX_FILE, weight_map) if indexed else [PICKLE_SINGLE_FILE]
    loaded = {file: unpickle(path / file) for file in files}
    tensors = collect(
        path, [(file, {k: info_of_tensor(k, t, path / file) for k, t in loaded[file].items()}) for file in files]
    )
    require_places(path / PICKLE_INDEX_FILE, weight_map, tensors)
    return Checkpoint(path, config, tensors, {key: t for file in files for key, t in loaded[file].items()})
