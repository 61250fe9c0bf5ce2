"""A checkpoint directory as named tensors, read lazily and without memory mapping.

Only safetensors is read by default. Every header is checked before the first tensor is: a missing or truncated shard, an
index that points outside the directory or names a tensor no shard holds, is an error that says so.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from quantforge.errors import SourceError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HEADER_LIMIT_BYTES = 100_000_000
COPY_CHUNK_BYTES = 16 << 20
FINGERPRINT_SAMPLES = 16
FINGERPRINT_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `start` is its first byte in `file`, `dtype` a safetensors dtype name."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    total_bytes: int


class TensorSource(Protocol):
    """Named tensors of one checkpoint; implemented by `Checkpoint` and by `packed.PackedCheckpoint`."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def keys(self) -> list[str]: ...
    def shape(self, key: str) -> tuple[int, ...]: ...
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

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors[key].shape

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
        with open(self.path / info.file, "rb") as handle:
            handle.seek(info.start)
            got = handle.readinto(memoryview(buffer.numpy())) if info.total_bytes else 0
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
            yield self.pickled[key].contiguous().view(torch.uint8).numpy().tobytes()
            return
        with open(self.path / info.file, "rb") as handle:
            handle.seek(info.start)
            left = info.total_bytes
            while left:
                chunk = handle.read(min(left, COPY_CHUNK_BYTES))
                if not chunk:
                    raise SourceError(f"{self.path / info.file}: {key} ends {left} bytes early")
                left -= len(chunk)
                yield chunk

    def fingerprint(self) -> str:
        """A hash of the config, of every tensor's name, dtype, shape and place, and of samples of every weight file."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for key, info in self.tensors.items():
            digest.update(f"{key}|{info}".encode())
        for file in sorted({info.file for info in self.tensors.values()}):
            size = (self.path / file).stat().st_size
            with open(self.path / file, "rb") as handle:
                for sample in range(FINGERPRINT_SAMPLES):
                    handle.seek(sample * max(0, size - FINGERPRINT_SAMPLE_BYTES) // (FINGERPRINT_SAMPLES - 1))
                    digest.update(handle.read(FINGERPRINT_SAMPLE_BYTES))
        return digest.hexdigest()


def open_checkpoint(model: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Open a local directory or a hub id; checks every header, reads no weights.

    Raises SourceError for anything missing, truncated, hostile or inconsistent, and for pickle weights unless
    `allow_pickle` is set.
    """
    path = resolve_model(model)
    config = read_config(path)
    if (path / INDEX_FILE).is_file():
        tensors = _indexed(path, INDEX_FILE)
    elif (path / SINGLE_FILE).is_file():
        tensors = dict(_header(path, SINGLE_FILE))
    else:
        return _open_pickled(path, config, allow_pickle)
    return Checkpoint(path, config, tensors)


def resolve_model(model: str | Path) -> Path:
    """The local directory of a model: the directory itself, or a hub id's downloaded snapshot."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise SourceError(f"{path} is a file; MODEL is a checkpoint directory or a hub id such as org/name")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) or str(model).startswith("."):
        raise SourceError(f"no checkpoint directory at {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.py", "*.model", "*.txt", "*.tiktoken"]
    try:
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise SourceError(
            f"no checkpoint directory at {model}, and the hub has no reachable model of that id "
            f"({type(error).__name__}). Check the path, or download the model first and give its directory."
        ) from error


def read_config(path: Path) -> dict[str, Any]:
    """config.json as a dict; SourceError when it is absent, not JSON, or names no architecture."""
    config = read_json(path / "config.json")
    if not config.get("architectures") and not config.get("model_type"):
        raise SourceError(f"{path / 'config.json'} names neither architectures nor model_type: not a model's config")
    return config


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; SourceError naming the file and the place otherwise."""
    if not file.is_file():
        raise SourceError(f"{file} is missing")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise SourceError(f"{file} holds a {type(data).__name__}, not an object")
    return data


def _indexed(path: Path, index_file: str) -> dict[str, TensorInfo]:
    files = _index_files(path, index_file)
    weight_map: dict[str, str] = read_json(path / index_file)["weight_map"]
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for key, info in _header(path, file):
            if key in tensors:
                raise SourceError(f"{path}: {key} is in both {tensors[key].file} and {file}")
            tensors[key] = info
    lost = [key for key, file in weight_map.items() if key not in tensors or tensors[key].file != file]
    if lost:
        shown = ", ".join(f"{key} (in {weight_map[key]})" for key in lost[:3])
        raise SourceError(f"{path / index_file} lists {len(lost)} tensors that are not where it says: {shown}")
    return tensors


def _index_files(path: Path, index_file: str) -> list[str]:
    """The shard names of an index, all checked to be plain names of files that exist in the directory."""
    weight_map = read_json(path / index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise SourceError(f"{path / index_file} has no weight_map of tensor names to file names")
    files = sorted(set(weight_map.values()))
    hostile = [f for f in files if f != os.path.basename(f) or f in ("", ".", "..") or "\\" in f or "\0" in f]
    if hostile:
        raise SourceError(f"{path / index_file} names files outside its directory: {', '.join(map(repr, hostile[:3]))}")
    missing = [f for f in files if not (path / f).is_file()]
    if missing:
        raise SourceError(f"{path}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing[:5])}")
    return files


def _header(path: Path, file: str) -> list[tuple[str, TensorInfo]]:
    """Parse and check one safetensors header (https://github.com/huggingface/safetensors, section Format)."""
    full = path / file
    size = full.stat().st_size
    with open(full, "rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise SourceError(f"{full} is truncated or no safetensors file: {size} bytes, header of {length}")
        raw = handle.read(length)
    try:
        header = json.loads(raw)
        entries = [
            (key, str(e["dtype"]), tuple(int(d) for d in e["shape"]), int(e["data_offsets"][0]), int(e["data_offsets"][1]))
            for key, e in header.items()
            if key != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SourceError(f"{full} has a damaged safetensors header: {error}") from error
    found: list[tuple[str, TensorInfo]] = []
    for key, dtype, shape, start, stop in entries:
        if dtype not in DTYPES:
            raise SourceError(f"{full}: {key} has dtype {dtype}, which is not supported")
        count = 1
        for dim in shape:
            count *= dim
        if min((0, *shape)) < 0 or start < 0 or stop - start != count * DTYPES[dtype].itemsize:
            raise SourceError(f"{full}: {key} {dtype} {list(shape)} does not fit its {stop - start} bytes")
        if 8 + length + stop > size:
            raise SourceError(f"{full} is truncated: {key} ends at byte {8 + length + stop}, the file has {size}")
        found.append((key, TensorInfo(dtype, shape, file, 8 + length + start, stop - start)))
    return found


def _open_pickled(path: Path, config: dict[str, Any], allow_pickle: bool) -> Checkpoint:
    index, single = "pytorch_model.bin.index.json", "pytorch_model.bin"
    pickles = sorted(f.name for f in path.iterdir() if f.suffix in (".bin", ".pt", ".pth"))
    if not (path / index).is_file() and not (path / single).is_file():
        raise SourceError(f"{path} holds no {SINGLE_FILE} and no {INDEX_FILE}" + (f"; found {pickles}" if pickles else ""))
    if not allow_pickle:
        raise SourceError(
            f"{path} holds pickle weights ({', '.join(pickles[:3])}), which can run code when loaded. Convert them to "
            "safetensors, or pass --allow-pickle to read them with torch's restricted unpickler."
        )
    files = _index_files(path, index) if (path / index).is_file() else [single]
    pickled: dict[str, torch.Tensor] = {}
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for key, tensor in torch.load(path / file, map_location="cpu", mmap=True, weights_only=True).items():
            pickled[key] = tensor
            total_bytes = tensor.numel() * tensor.element_size()
            tensors[key] = TensorInfo(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), file, 0, total_bytes)
    return Checkpoint(path, config, tensors, pickled)
