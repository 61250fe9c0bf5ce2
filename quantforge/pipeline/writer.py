"""Assemble a checkpoint directory from committed layers and the source's other tensors, one tensor at a time."""

import json
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantforge.errors import SourceError, WorkspaceError
from quantforge.formats import CheckpointFacts, Format
from quantforge.model.packed import Copied
from quantforge.model.shards import DTYPE_NAMES, DTYPES, INDEX_FILE, SINGLE_FILE
from quantforge.pipeline.contents import Contents
from quantforge.pipeline.files import durable, sync_directory, sync_file
from quantforge.spec import QuantSpec

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"}
REPLACED_FILES = {"config.json", "quantize_config.json", "quantization_config.json", "quant_config.json"}
"""What describes the quantization, under the names that tools give it."""

SOURCES_OWN = {"README.md", "__pycache__"}
"""The model card makes claims and gives numbers that are not the quantized model's."""

SIDE_FILE_LIMIT_BYTES = 200 << 20
INDEX_SUFFIX = ".index.json"
SIDE_DIRECTORIES = ("additional_chat_templates",)


@dataclass(frozen=True)
class _Entry:
    """A tensor to write: one of those that encode `site`, else `value`, with neither the source's of that name."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    site: str | None
    value: torch.Tensor | None = None

    @property
    def total_bytes(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count * DTYPES[self.dtype].itemsize


def write_checkpoint(
    directory: Path,
    contents: Contents,
    chosen: Format,
    facts: CheckpointFacts,
    max_shard_bytes: int,
    name: str = "model",
) -> tuple[str, ...]:
    """Write weights, config and side files into an empty directory, which `publish` then gives its name.

    `name` is what a format whose container is one file calls it; such a file is not split.

    Returns the names of what is left behind of the source, sorted: weights that are not part of the checkpoint, side
    files over the limit, and directories (with a slash). What is hidden, caches and the model card are not named.
    """
    if chosen.container is None:
        _write_shards(directory, contents, chosen, facts, max_shard_bytes)
    else:
        whole = directory / f"{name}{chosen.container.suffix}"
        chosen.container.write(whole, contents)
        sync_file(whole)
    side_files, skipped = _side_files(contents.source, directory)
    _copy_side_files(contents.source.path, directory, side_files)
    write_json(directory / "config.json", {**contents.config, "quantization_config": chosen.config(facts)})
    for file, content in chosen.side_files(facts).items():
        write_json(directory / file, content)
    return skipped


def publish(staged: Path, output: Path) -> None:
    """Give a finished directory its final name, durably; WorkspaceError when the name has been taken meanwhile."""
    if os.path.lexists(output):
        raise WorkspaceError(f"{output} appeared during the run; the finished output is in {staged}")
    sync_tree(staged)
    os.rename(staged, output)
    sync_directory(output.resolve().parent)


def sync_tree(directory: Path) -> None:
    """Make the entries of every directory below `directory`, and then its own, durable; files were when written."""
    for path, _, _ in os.walk(directory, topdown=False):
        sync_directory(Path(path))


def write_json(file: Path, content: dict[str, Any]) -> None:
    """JSON with a trailing newline, flushed to the disk."""
    with durable(file) as handle:
        handle.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _write_shards(
    directory: Path, contents: Contents, chosen: Format, facts: CheckpointFacts, max_shard_bytes: int
) -> None:
    """Safetensors files of bounded size, with an index when there are several."""
    entries = _entries(contents, chosen, facts)
    shards = _split(entries, max_shard_bytes)
    names = [SINGLE_FILE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(directory / name, shard, contents, chosen, facts)
    total_bytes = sum(entry.total_bytes for entry in entries)
    if len(shards) > 1:
        weight_map = {entry.key: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _entries(contents: Contents, chosen: Format, facts: CheckpointFacts) -> list[_Entry]:
    """Every output tensor, in the source's order; one site of each shape and grid is encoded to learn its tensors."""
    layouts: dict[tuple[int, int, QuantSpec], list[tuple[str, str, tuple[int, ...]]]] = {}
    entries: list[_Entry] = []
    placed: set[str] = set()
    for key, info in contents.source.tensors.items():
        name = contents.packed.get(key)
        if name is None:
            if key not in contents.unused:
                entries.append(_Entry(key, info.dtype, info.shape, None))
            continue
        if name in placed:
            continue
        placed.add(name)
        site = contents.shapes[name]
        shape = (site.out_features, site.in_features, contents.specs[name])
        if shape not in layouts:
            encoded = chosen.encode(name, contents.weight(name), facts)
            layouts[shape] = [(key[len(name) :], DTYPE_NAMES[t.dtype], tuple(t.shape)) for key, t in encoded.items()]
        entries += [_Entry(name + suffix, dtype, dims, name) for suffix, dtype, dims in layouts[shape]]
    for name, scales in contents.cache_scales.items():
        assert chosen.encode_cache is not None and contents.kv_cache is not None, "such formats are refused"
        for key, value in chosen.encode_cache(name, scales, contents.kv_cache).items():
            entries.append(_Entry(key, DTYPE_NAMES[value.dtype], tuple(value.shape), None, value))
    seen: set[str] = set()
    for entry in entries:
        if entry.key in seen:
            raise SourceError(f"the export would hold {entry.key} twice; the source already has a tensor of that name")
        seen.add(entry.key)
    return entries


def _split(entries: list[_Entry], max_shard_bytes: int) -> list[list[_Entry]]:
    """Consecutive shards of bounded size; a tensor larger than the bound has a shard of its own."""
    shards: list[list[_Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.total_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.total_bytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_shard(
    file: Path,
    shard: list[_Entry],
    contents: Contents,
    chosen: Format,
    facts: CheckpointFacts,
) -> None:
    """One safetensors file, streamed: header first, then each tensor's bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in shard:
        stop = offset + entry.total_bytes
        header[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, stop]}
        offset = stop
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    with durable(file) as handle:
        handle.write(struct.pack("<Q", len(raw)) + raw)
        encoded: dict[str, torch.Tensor] = {}
        for entry in shard:
            if entry.site is not None:
                if entry.key not in encoded:
                    encoded = chosen.encode(entry.site, contents.weight(entry.site), facts)
                _write_tensor(handle, entry, encoded[entry.key])
            elif entry.value is not None:
                _write_tensor(handle, entry, entry.value)
            elif entry.key in contents.changed:
                _write_tensor(handle, entry, contents.tensor(entry.key))
            else:
                contents.source.copy_bytes(entry.key, handle)
    expected = 8 + len(raw) + offset
    if file.stat().st_size != expected:
        raise SourceError(f"{file} has {file.stat().st_size} bytes after writing, expected {expected}")


def _write_tensor(handle: Any, entry: _Entry, tensor: torch.Tensor) -> None:
    if (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) != (entry.dtype, entry.shape):
        raise SourceError(f"{entry.key} is {tensor.dtype} {list(tensor.shape)}, planned {entry.dtype} {entry.shape}")
    handle.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _copy_side_files(source: Path, directory: Path, files: list[Path]) -> None:
    """Carry over tokenizer, chat template, generation config, custom code and processor files."""
    for file in files:
        target = directory / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        with open(file, "rb") as original, durable(target) as copy:
            shutil.copyfileobj(original, copy)


def _side_files(checkpoint: Copied, output: Path) -> tuple[list[Path], tuple[str, ...]]:
    """(files to copy, names of what is left behind and may be missed); `output` may lie in the source's directory."""
    own = {info.file for info in checkpoint.tensors.values()} | REPLACED_FILES | SOURCES_OWN
    found: list[Path] = []
    skipped: list[str] = []
    for entry in sorted(checkpoint.path.iterdir()):
        if entry.name.startswith(".") or entry.name in own:
            continue
        if entry.is_dir() and entry.name not in SIDE_DIRECTORIES:
            if not output.resolve().is_relative_to(entry.resolve()):
                skipped.append(f"{entry.name}/")
            continue
        for file in sorted(entry.iterdir()) if entry.is_dir() else [entry]:
            if not file.is_file() or file.name.endswith(INDEX_SUFFIX):
                continue
            if file.suffix in WEIGHT_SUFFIXES or file.stat().st_size > SIDE_FILE_LIMIT_BYTES:
                skipped.append(str(file.relative_to(checkpoint.path)))
            else:
                found.append(file)
    return found, tuple(skipped)
