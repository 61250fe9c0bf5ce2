"""Re-open a written checkpoint with an independent reader and require exactly what was to be written.

Nothing of the writing side is used here: files are opened with the safetensors library, packed tensors are decoded by
`quantforge.readers`, which is written from the formats' specifications.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quantforge.errors import SourceError, VerifyError
from quantforge.model.activations import activation_spec
from quantforge.model.kv_cache import cache_spec
from quantforge.pipeline.contents import Contents
from quantforge.pipeline.verify_gguf import check_gguf
from quantforge.readers import Reader, load_reader

SHOWN_PROBLEMS = 20


class _Files:
    """The tensors of a directory, through its index when it has one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: list[str] = []
        self.where: dict[str, str] = {}
        self.declared_bytes: int | None = None
        index = directory / "model.safetensors.index.json"
        indexed: dict[str, str] = {}
        if index.exists():
            content = json.loads(index.read_text(encoding="utf-8"))
            indexed = content["weight_map"]
            self.declared_bytes = content["metadata"]["total_size"]
        present = sorted(file.name for file in directory.glob("*.safetensors"))
        for name in present:
            try:
                with safe_open(directory / name, "pt") as tensors:
                    for key in tensors.keys():  # noqa: SIM118  (not a dict)
                        if key in self.where:
                            self.problems.append(f"{key} is in both {self.where[key]} and {name}")
                        self.where[key] = name
            except (SafetensorError, OSError) as error:
                self.problems.append(f"{name} cannot be opened: {error}")
        if indexed and indexed != self.where:
            self.problems.append(f"the index lists {len(indexed)} tensors, the files hold {len(self.where)} or differ")
        if not indexed and present != ["model.safetensors"]:
            self.problems.append(f"without an index there must be one model.safetensors; found {present}")

    def tensor(self, key: str) -> torch.Tensor:
        with safe_open(self.directory / self.where[key], "pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(key)
            return found


def verify_checkpoint(directory: Path, contents: Contents) -> int:
    """Compare every tensor of a written checkpoint; returns how many were compared.

    Raises VerifyError with every mismatch: a site whose codes or dequantized weights differ in a single bit, a copied
    tensor that differs from the source or from what a transform made of it, a tensor too many or too few, byte counts
    that do not add up, a config that does not describe the grid.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    quantization: dict[str, Any] = config.get("quantization_config", {})
    if quantization.get("quant_method") == "gguf":
        problems, count = check_gguf(directory, contents)
    else:
        problems, count = _check_safetensors(_Files(directory), quantization, contents)
    if problems:
        more = [f"... and {len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
        raise VerifyError([f"{directory} does not read back:", *problems[:SHOWN_PROBLEMS], *more])
    return count


def _check_safetensors(files: _Files, quantization: dict[str, Any], contents: Contents) -> tuple[list[str], int]:
    """Every mismatch, and how many tensors there are."""
    problems = files.problems
    reader = load_reader(str(quantization.get("quant_method")))
    grouped = reader.group_keys(files.where)
    expected = contents.shapes.keys()
    problems += [f"{name}: written, but not planned" for name in sorted(grouped.keys() - expected)]
    problems += [f"{name}: planned, but not written" for name in sorted(expected - grouped.keys())]

    packed = {key for parts in _cache_keys(reader, files).values() for key in parts.values()}
    problems += _check_cache(files, reader, quantization, contents)
    for name in contents.shapes:
        if name in grouped:
            packed |= set(grouped[name].values())
            problems += _check_site(files, reader, quantization, name, grouped[name], contents)
    copied = [key for key in contents.source.tensors if key not in contents.packed and key not in contents.unused]
    for key in copied:
        if key not in files.where:
            problems.append(f"{key}: missing")
        elif key in contents.changed:
            if not _same_bytes(files.tensor(key), contents.tensor(key)):
                problems.append(f"{key}: differs from what the transform made of it")
        elif not _same_bytes(files.tensor(key), contents.source.read(key)):
            problems.append(f"{key}: differs from the source")
    problems += [f"{key}: nobody asked for it" for key in sorted(files.where.keys() - packed - set(copied))]
    total_bytes = sum(_tensor_bytes(files, name) for name in sorted(set(files.where.values())))
    if files.declared_bytes is not None and total_bytes != files.declared_bytes:
        problems.append(f"the index declares {files.declared_bytes} bytes, the files hold {total_bytes}")
    return problems, len(files.where)


def _check_site(
    files: _Files,
    reader: Reader,
    quantization: dict[str, Any],
    name: str,
    keys: dict[str, str],
    contents: Contents,
) -> list[str]:
    try:
        scheme = reader.scheme(quantization, name)
        activations = activation_spec(scheme.activations, name)
        decoded = reader.decode({suffix: files.tensor(key) for suffix, key in keys.items()}, scheme, name)
    except SourceError as error:
        return [f"{name}: {error}"]
    problems = []
    if activations != contents.activations:
        problems.append(f"{name}: config says {activations} of its inputs, planned were {contents.activations}")
    described = (scheme.bits, scheme.group_size, scheme.symmetric)
    spec, expected = contents.specs[name], contents.expected(name)
    wanted = (spec.bits, spec.group_size, spec.symmetric)
    if described != wanted:
        problems.append(f"{name}: config says {described} (bits, group size, symmetric), planned was {wanted}")
    if not torch.equal(decoded.codes, expected.codes):
        differing = int((decoded.codes != expected.codes).sum())
        problems.append(f"{name}: {differing} of {expected.codes.numel()} codes differ")
    elif not torch.equal(decoded.dequantize(), expected.dequantize()):
        problems.append(f"{name}: same codes, but different dequantized weights")
    return problems


def _cache_keys(reader: Reader, files: _Files) -> dict[str, dict[str, str]]:
    return {} if reader.cache is None else reader.cache.group_keys(files.where)


def _check_cache(files: _Files, reader: Reader, quantization: dict[str, Any], contents: Contents) -> Iterator[str]:
    """What is said of the cache, and the scales of every module that has one."""
    found, expected = _cache_keys(reader, files), contents.cache_scales
    yield from (
        f"{name}: scales of a cache written, but not planned" for name in sorted(found.keys() - expected.keys())
    )
    yield from (
        f"{name}: scales of a cache planned, but not written" for name in sorted(expected.keys() - found.keys())
    )
    if reader.cache is None:
        if contents.kv_cache is not None:
            yield f"config says nothing of a cache, planned were {contents.kv_cache.label()}"
        return
    try:
        scheme = reader.cache.scheme(quantization)
        described = None if scheme is None else cache_spec(scheme)
        if described != contents.kv_cache:
            yield f"config says {described} of the cache, planned was {contents.kv_cache}"
        if scheme is None:
            return
        for name in sorted(expected.keys() & found.keys()):
            tensors = {suffix: files.tensor(key) for suffix, key in found[name].items()}
            wanted = (expected[name].k, expected[name].v)
            for scale, own in zip(reader.cache.decode(tensors, scheme, name), wanted, strict=True):
                if not _same_bytes(scale, own):
                    yield f"{name}: scales of its cache are {scale.tolist()}, calibrated were {own.tolist()}"
    except SourceError as error:
        yield str(error)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    )


def _tensor_bytes(files: _Files, name: str) -> int:
    """Bytes of tensor data in one file, from the file's size and its header's length."""
    file = files.directory / name
    with open(file, "rb") as handle:
        header_bytes = int.from_bytes(handle.read(8), "little")
    return file.stat().st_size - 8 - header_bytes
