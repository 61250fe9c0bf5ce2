"""Assemble a checkpoint directory from committed layers and the source's other tensors, one tensor at a time."""

import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantforge.errors import SourceError
from quantforge.formats import CheckpointFacts, Format
from quantforge.model.shards import DTYPE_NAMES, DTYPES, INDEX_FILE, SINGLE_FILE
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.workspace import Workspace, durable, sync_directory

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"}
SKIPPED_FILES = {"config.json", "quantize_config.json", "README.md", ".gitattributes"}
SIDE_FILE_LIMIT_BYTES = 200 << 20
SIDE_DIRECTORIES = ("additional_chat_templates",)


@dataclass(frozen=True)
class _Entry:
    """A tensor to write: `site` is the index into the plan's sites that produces it, None for a copy of `key`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    site: int | None

    @property
    def total_bytes(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count * DTYPES[self.dtype].itemsize


def write_checkpoint(
    directory: Path, plan: Plan, workspace: Workspace, chosen: Format, facts: CheckpointFacts, max_shard_bytes: int
) -> None:
    """Write weights, config and side files into an empty directory."""
    entries = _entries(plan, workspace, chosen, facts)
    shards = _split(entries, max_shard_bytes)
    names = [SINGLE_FILE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(directory / name, shard, plan, workspace, chosen, facts)
    total_bytes = sum(entry.total_bytes for entry in entries)
    if len(shards) > 1:
        weight_map = {entry.key: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    _copy_side_files(plan.checkpoint.path, directory)
    write_json(directory / "config.json", plan.checkpoint.config | {"quantization_config": chosen.config(facts)})
    for file, content in chosen.side_files(facts).items():
        write_json(directory / file, content)
    sync_directory(directory)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """JSON with a trailing newline, flushed to the disk."""
    with durable(file) as handle:
        handle.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def _entries(plan: Plan, workspace: Workspace, chosen: Format, facts: CheckpointFacts) -> list[_Entry]:
    """Every output tensor, in the source's order; sites of one shape are encoded once to learn their tensors."""
    by_key = {f"{site.name}.weight": index for index, site in enumerate(plan.sites)}
    layouts: dict[tuple[int, int], list[tuple[str, str, tuple[int, ...]]]] = {}
    entries: list[_Entry] = []
    seen: set[str] = set()
    for key, info in plan.checkpoint.tensors.items():
        index = by_key.get(key)
        if index is None:
            entries.append(_Entry(key, info.dtype, info.shape, None))
            continue
        site = plan.sites[index]
        shape = (site.out_features, site.in_features)
        if shape not in layouts:
            encoded = chosen.encode(site.name, workspace.weight(site.layer, site.name, site.in_features), facts)
            layouts[shape] = [
                (name[len(site.name) :], DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in encoded.items()
            ]
        entries += [_Entry(site.name + suffix, dtype, dims, index) for suffix, dtype, dims in layouts[shape]]
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
    plan: Plan,
    workspace: Workspace,
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
            if entry.site is None:
                plan.checkpoint.copy_bytes(entry.key, handle)
            else:
                if entry.key not in encoded:
                    encoded = _encode(entry.site, plan, workspace, chosen, facts)
                _write_tensor(handle, entry, encoded[entry.key])
    expected = 8 + len(raw) + offset
    if file.stat().st_size != expected:
        raise SourceError(f"{file} has {file.stat().st_size} bytes after writing, expected {expected}")


def _encode(
    index: int, plan: Plan, workspace: Workspace, chosen: Format, facts: CheckpointFacts
) -> dict[str, torch.Tensor]:
    site = plan.sites[index]
    return chosen.encode(site.name, workspace.weight(site.layer, site.name, site.in_features), facts)


def _write_tensor(handle: Any, entry: _Entry, tensor: torch.Tensor) -> None:
    if (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) != (entry.dtype, entry.shape):
        raise SourceError(f"{entry.key} is {tensor.dtype} {list(tensor.shape)}, planned {entry.dtype} {entry.shape}")
    handle.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _copy_side_files(source: Path, directory: Path) -> None:
    """Carry over tokenizer, chat template, generation config, custom code and processor files."""
    for file in _side_files(source):
        target = directory / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        with open(file, "rb") as original, durable(target) as copy:
            shutil.copyfileobj(original, copy)


def _side_files(source: Path) -> Iterator[Path]:
    for file in sorted(source.iterdir()):
        if file.is_dir() and file.name in SIDE_DIRECTORIES:
            yield from (f for f in sorted(file.iterdir()) if f.is_file())
        if (
            file.is_file()
            and not file.name.startswith(".")
            and file.name not in SKIPPED_FILES
            and not file.name.endswith(".index.json")
            and file.suffix not in WEIGHT_SUFFIXES
            and file.stat().st_size <= SIDE_FILE_LIMIT_BYTES
        ):
            yield file
