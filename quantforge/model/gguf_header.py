"""What a GGUF file says of itself: metadata and the place of every tensor, checked before anything is read.

Written from the specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and the checks of llama.cpp's
loader (ggml/src/gguf.cpp). No count is believed before the file is long enough for it, so that a damaged file costs
neither memory nor time.
"""

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from quantforge.errors import SourceError
from quantforge.extras import need
from quantforge.model.shards import HEADER_LIMIT_BYTES, SIZE_LIMIT, opened

VERSIONS = (2, 3)
DIMS_LIMIT = 4
NAME_LIMIT = 64
"""Of a tensor, the closing zero included."""

ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
STRING, ARRAY = 8, 9
SMALLEST_PAIR = 8 + 4 + 1  # an empty key, a type and a byte
SMALLEST_TENSOR = 8 + 4 + 4 + 8  # an empty name, no dims, a type and an offset


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: `kind` is its type in the file (``F32``, ``Q4_0``, ...), `shape` that of its weights.

    `start` is its first byte in the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    total_bytes: int


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """Metadata by key (numbers, strings, lists of strings, arrays of numbers), and the tensors in the file's order."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """Reads forward, and refuses what the file, or the limit of a header, has no room for."""

    def __init__(self, handle: BufferedReader) -> None:
        self.handle = handle
        self.size = os.fstat(handle.fileno()).st_size
        self.place = 0

    def bytes(self, count: int, what: str) -> bytes:
        self.room(count, 1, what)
        raw = self.handle.read(count)
        if len(raw) != count:
            raise ValueError(f"{what} ends after {len(raw)} of {count} bytes")
        self.place += count
        return raw

    def room(self, count: int, each: int, what: str) -> None:
        """ValueError unless `count` things of at least `each` bytes can still come."""
        left = min(self.size, HEADER_LIMIT_BYTES) - self.place
        if count * each > left:
            raise ValueError(f"{what} would take {count * each} bytes, {left} are left")

    def number(self, code: str, what: str) -> int:
        (found,) = struct.unpack(f"<{code}", self.bytes(struct.calcsize(code), what))
        return int(found)

    def text(self, what: str) -> str:
        return self.bytes(self.number("Q", what), what).decode()

    def value(self, kind: int, what: str) -> Any:
        """A number, a string, a list of strings or a numpy array of numbers."""
        if kind == STRING:
            return self.text(what)
        if kind in SCALARS:
            return np.frombuffer(self.bytes(np.dtype(SCALARS[kind]).itemsize, what), SCALARS[kind])[0].item()
        if kind != ARRAY:
            raise ValueError(f"{what} has the unknown type {kind}")
        item, count = self.number("I", what), self.number("Q", what)
        if item == STRING:
            self.room(count, 8, what)
            return [self.text(what) for _ in range(count)]
        if item not in SCALARS:
            raise ValueError(f"{what} is an array of the unknown type {item}")
        self.room(count, np.dtype(SCALARS[item]).itemsize, what)
        return np.frombuffer(self.bytes(count * np.dtype(SCALARS[item]).itemsize, what), SCALARS[item])


def read_gguf_header(file: Path) -> GgufHeader:
    """Parse and check everything before the tensors' bytes.

    As llama.cpp asks, tensors follow each other in the file, each at the next multiple of the alignment. Raises
    SourceError for a truncated or damaged file, one of another version or byte order, and a type that the package gguf
    does not know.
    """
    with opened(file) as handle:
        cursor = _Cursor(handle)
        try:
            if cursor.bytes(4, "the file") != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            version = cursor.number("I", "the version")
            if version not in VERSIONS:
                raise ValueError(f"its version is {version}; {' and '.join(map(str, VERSIONS))} can be read")
            tensors, pairs = cursor.number("Q", "the count of tensors"), cursor.number("Q", "the count of keys")
            cursor.room(pairs, SMALLEST_PAIR, f"metadata of {pairs} keys")
            metadata: dict[str, Any] = {}
            for _ in range(pairs):
                key = cursor.text("a key")
                if key in metadata:
                    raise ValueError(f"{key[:80]!r} is given twice")
                metadata[key] = cursor.value(cursor.number("I", f"{key[:80]!r}"), f"{key[:80]!r}")
            cursor.room(tensors, SMALLEST_TENSOR, f"the places of {tensors} tensors")
            infos = [_described(cursor) for _ in range(tensors)]
            return GgufHeader(metadata, tuple(_placed(cursor, infos, metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))))
        except (ValueError, MemoryError) as error:
            raise SourceError(f"{file} is truncated or no GGUF file: {error}", "gguf") from error


def _described(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape with the row last, number of the type, and offset of the next tensor."""
    name = cursor.text("the name of a tensor")
    if len(name.encode()) >= NAME_LIMIT:
        raise ValueError(f"a tensor's name has {len(name.encode())} bytes, more than {NAME_LIMIT - 1}: {name[:80]!r}")
    dims = cursor.number("I", name)
    if dims > DIMS_LIMIT:
        raise ValueError(f"{name} has {dims} dims, more than {DIMS_LIMIT}")
    shape = tuple(cursor.number("Q", name) for _ in range(dims))[::-1]
    return name, shape, cursor.number("I", name), cursor.number("Q", name)


def _placed(
    cursor: _Cursor, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: Any
) -> Iterator[GgufTensor]:
    """The tensors, each checked against the one before it and the end of the file."""
    gguf = need("gguf", "reading a GGUF file")
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1) or alignment > HEADER_LIMIT_BYTES:
        raise ValueError(f"{ALIGNMENT_KEY} is {alignment!r}, no power of two")
    start, end = _padded(cursor.place, alignment), 0
    seen: set[str] = set()
    for name, shape, number, offset in infos:
        kind = gguf.GGMLQuantizationType(number)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        weights = math.prod(shape)
        if name in seen:
            raise ValueError(f"the tensor {name} is there twice")
        seen.add(name)
        if not shape or not 0 < weights < SIZE_LIMIT or shape[-1] % block:
            raise ValueError(f"{name} cannot have the shape {list(shape)}: blocks of {kind.name} hold {block} weights")
        if offset != end:
            raise ValueError(f"{name} is said to be at byte {offset} of the tensors, and the one before ends at {end}")
        total_bytes = weights // block * block_bytes
        if start + offset + total_bytes > cursor.size:
            raise ValueError(f"{name} ends at byte {start + offset + total_bytes}, the file at {cursor.size}")
        end = _padded(offset + total_bytes, alignment)
        yield GgufTensor(name, kind.name, shape, start + offset, total_bytes)


def _padded(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
