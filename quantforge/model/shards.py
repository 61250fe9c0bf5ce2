"""Safetensors files and the index of several: which tensor lies where, checked before anything is read."""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeGuard

import torch

from quantforge.errors import SourceError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HEADER_LIMIT_BYTES = 100_000_000
SIZE_LIMIT = 1 << 60  # of the elements of a tensor; torch counts bytes in 64 bits
NUMBER_LIMIT = 1 << 100  # of what a header says, so that any product of dims can be printed
DIMS_LIMIT = 16


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `start` is its first byte in `file`, `dtype` a safetensors dtype name."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    total_bytes: int


# ------------------------------------------------------------------------------------------------ one file


def read_header(full: Path) -> dict[str, TensorInfo]:
    """Parse and check one safetensors header (https://github.com/huggingface/safetensors, section Format).

    As the format asks, tensors must follow each other without overlap or hole and fill the file to its last byte.
    """
    with opened(full) as handle:
        size = os.fstat(handle.fileno()).st_size
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if prefix == b"version ":
            raise SourceError(
                f"{full} is a Git LFS pointer of {size} bytes, not the weights; run git lfs pull", "lfs-pointer"
            )
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise SourceError(
                f"{full} is truncated or no safetensors file: {size} bytes, header of {length}", "truncated"
            )
        raw = handle.read(length)
    header = _parse_json(raw, f"{full}: the header")
    found = {key: _tensor_info(full, key, e, 8 + length) for key, e in header.items() if key != "__metadata__"}
    end = 8 + length
    for key, info in sorted(found.items(), key=lambda item: (item[1].start, item[1].total_bytes)):
        if info.start != end:
            fault = "overlaps the tensor before it" if info.start < end else "leaves a hole before it"
            raise SourceError(f"{full}: {key} {fault}: it starts at byte {info.start}, not at {end}", "offsets")
        end += info.total_bytes
    if end > size:
        raise SourceError(f"{full} is truncated: its tensors end at byte {end}, the file has {size}", "truncated")
    if end < size:
        raise SourceError(
            f"{full} is damaged: its tensors end at byte {end}, the file has {size - end} more", "offsets"
        )
    return found


def _tensor_info(full: Path, key: str, entry: Any, data_start: int) -> TensorInfo:
    dtype, shape, offsets = (
        map(entry.get, ("dtype", "shape", "data_offsets")) if isinstance(entry, dict) else [None] * 3
    )
    if not isinstance(dtype, str) or not _is_naturals(shape) or not _is_naturals(offsets) or len(offsets) != 2:
        raise SourceError(f"{full}: the header's entry of {key} is damaged: {str(entry)[:200]}", "header")
    if dtype not in DTYPES:
        raise SourceError(
            f"{full}: {key} has dtype {dtype[:40]}, which is not supported; known are {', '.join(DTYPES)}", "header"
        )
    needed = DTYPES[dtype].itemsize * math.prod(shape)
    start, stop = offsets
    if stop - start != needed:
        raise SourceError(
            f"{full}: {key} {dtype} {shape} takes {needed} bytes, its offsets {offsets} are {stop - start} apart",
            "offsets",
        )
    if math.prod(dim for dim in shape if dim) >= SIZE_LIMIT:  # empty, but no tensor can be that large
        raise SourceError(f"{full}: {key} has the shape {shape}, which no tensor can have", "header")
    return TensorInfo(dtype, tuple(shape), full.name, data_start + start, needed)


def _is_naturals(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > DIMS_LIMIT:
        return False
    return all(type(item) is int and 0 <= item < NUMBER_LIMIT for item in value)


def header_bytes(tensors: Mapping[str, TensorInfo]) -> bytes:
    """The first bytes of a file that holds these tensors, one behind the other: length and header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, info in tensors.items():
        stop = offset + info.total_bytes
        header[key] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offset, stop]}
        offset = stop
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


# ------------------------------------------------------------------------------------------------ several files


def read_weight_map(index_file: Path) -> dict[str, str]:
    """Tensor -> file name, from an index."""
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise SourceError(f"{index_file} has no weight_map of tensor names to file names", "index")
    if not weight_map:
        raise SourceError(f"{index_file} has an empty weight_map: it names no tensor", "index")
    return weight_map


def files_of_index(index_file: Path, weight_map: dict[str, str]) -> list[str]:
    """The shard names of an index, all checked to be plain names of files that exist beside it."""
    files = sorted(set(weight_map.values()))
    if hostile := hostile_names(files):
        shown = ", ".join(map(repr, hostile[:3]))
        raise SourceError(f"{index_file} must name files that lie beside it; {len(hostile)} do not: {shown}")
    missing = sorted(set(files) - set(file_names(index_file.parent)))
    if missing:
        raise SourceError(
            f"{index_file.parent}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing[:5])}"
        )
    return files


def hostile_names(files: Iterable[str]) -> list[str]:
    """Those that are anything but the plain name of a file beside the index."""
    return [f for f in files if f != os.path.basename(f) or f in ("", ".", "..") or "\\" in f or "\0" in f]


def collect(path: Path, found: list[tuple[str, dict[str, TensorInfo]]]) -> dict[str, TensorInfo]:
    """The tensors of all files; one name in two files is an error, as it would be a guess which one is meant."""
    tensors: dict[str, TensorInfo] = {}
    for file, infos in found:
        for key in infos.keys() & tensors.keys():
            raise SourceError(f"{path}: {key} is in both {tensors[key].file} and {file}")
        tensors |= infos
    if not tensors:
        raise SourceError(f"{path}: {', '.join(file for file, _ in found)} holds no tensor")
    return tensors


def require_places(index_file: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    """SourceError unless every tensor of the index is in the file the index names."""
    lost = [key for key, file in weight_map.items() if key not in tensors or tensors[key].file != file]
    if lost:
        found = {key: f"is in {tensors[key].file}" if key in tensors else "is nowhere" for key in lost[:3]}
        shown = ", ".join(f"{key} (said to be in {weight_map[key]}, {where})" for key, where in found.items())
        raise SourceError(f"{index_file} lists {len(lost)} tensors that are not where it says: {shown}")


# ------------------------------------------------------------------------------------------------ reading


def file_names(path: Path) -> list[str]:
    """Sorted names of the files in a directory; links to files count, broken links do not."""
    try:
        return sorted(entry.name for entry in path.iterdir() if entry.is_file())
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; SourceError naming the file and the place otherwise."""
    if not file.is_file():
        raise SourceError(f"{file} is missing", "missing-file")
    with opened(file) as handle:
        raw = handle.read()
    return _parse_json(raw, str(file))


def _parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object whose keys are unique and whose strings are text, as it can be written again."""
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
        json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair is found here
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{what} is not valid JSON: {error}", "json") from error
    if not isinstance(data, dict):
        raise SourceError(f"{what} holds a {type(data).__name__}, not an object", "json")
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return found


def leaves(file: Path) -> bool:
    """Whether a file is a link that leads out of its directory; the hub's cache keeps its files in ``blobs``."""
    root, real = Path(os.path.realpath(file.parent)), Path(os.path.realpath(file))
    blobs = root.parent.parent / "blobs"
    return not real.is_relative_to(root) and not (root.parent.name == "snapshots" and real.is_relative_to(blobs))


@contextmanager
def opened(file: Path) -> Iterator[BufferedReader]:
    """A file open for reading; whatever the system refuses, and a link out of the directory, is a SourceError."""
    if os.path.islink(file) and leaves(file):
        raise SourceError(
            f"{file} is a link to {os.path.realpath(file)}, which is outside of the checkpoint's directory; it is not "
            "followed: put the file itself there",
            "link",
        )
    try:
        with open(file, "rb") as handle:
            yield handle
    except OSError as error:
        raise SourceError(f"{file} cannot be read: {error.strerror or error}") from error
