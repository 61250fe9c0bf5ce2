"""A GGUF file as the source of a conversion: whether its blocks are grids, and config.json that of its model.

A file states no more of a model than llama.cpp needs, so config.json and the tokenizer come from a directory: its own,
where it is an export of ours, or an original checkpoint's. They must say what the file says.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantforge.errors import PlanError
from quantforge.extras import need
from quantforge.formats.gguf.architecture import (
    ARCHITECTURES,
    add_hyperparameters,
    config_problems,
    head_size,
    rope_factors,
)
from quantforge.formats.gguf.vocabulary import add_vocabulary, vocabulary_problems
from quantforge.model.gguf_file import GgufCheckpoint, is_gguf_file, open_gguf
from quantforge.model.gguf_header import GgufTensor
from quantforge.model.gguf_sites import GgufSites, odd_blocks, read_sites
from quantforge.pipeline.carried import Progress, without_quantization

NEEDED = ("config.json", "tokenizer.json")
ROPE_FACTORS = "rope_freqs.weight"
FACTOR_TOLERANCE = 1e-5
"""Relative; what computes rotary factors in float32 rounds here and there."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, or a directory with one and no safetensors."""
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return is_gguf_file(path)


def open_gguf_sites(path: Path, config: Path | None, progress: Progress) -> GgufSites:
    """Open a GGUF file, or a directory that holds one, with the directory of its config.json and tokenizer.

    Raises PlanError with every reason why the blocks are no grids that another format could hold, or why `config` (the
    file's own directory when None) does not describe it; SourceError for a damaged file.
    """
    directory = config or (path if path.is_dir() else path.parent)
    if lacking := [name for name in NEEDED if not (directory / name).is_file()]:
        raise PlanError(
            [
                f"{directory} has no {' and no '.join(lacking)}, which a GGUF file does not hold in full; give "
                "--config DIR, the directory of the original checkpoint (its weights are not needed)"
            ]
        )
    file = open_gguf(path, directory)
    stated = without_quantization(file.config)
    if problems := [*odd_blocks(file), *_differences(file, stated)]:
        raise PlanError([f"{file.file} cannot be converted:", *problems])
    return read_sites(file, stated, progress)


def _differences(file: GgufCheckpoint, config: dict[str, Any]) -> Iterator[str]:
    """Where config.json or tokenizer.json say something else than the file, by what would be written of them."""
    directory = file.path
    if problems := list(config_problems(config)):
        yield from problems
        return
    if (meant := ARCHITECTURES[config["model_type"]]) != file.architecture:
        yield f"the file holds a {file.architecture}, {directory / 'config.json'} describes a {meant}"
        return
    gguf = need("gguf", "reading a GGUF file")
    writer = gguf.GGUFWriter(None, file.architecture)
    add_hyperparameters(writer, config)
    if problems := list(vocabulary_problems(directory, config["vocab_size"])):
        yield from problems
    else:
        add_vocabulary(writer, directory, config["vocab_size"])
    ours = {key: entry.value for key, entry in writer.kv_data[0].items()}
    for size in ("key_length", "value_length"):
        ours.setdefault(f"{file.architecture}.attention.{size}", head_size(config))
    theirs = file.header.metadata
    for key in sorted(theirs):
        if key.startswith(f"{file.architecture}.") and not _same(theirs[key], ours.get(key)):
            yield f"the file says {key} {_short(theirs[key])}, {directory / 'config.json'} {_short(ours.get(key))}"
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.tokens"):
        if key in ours and key in theirs and not _same(theirs[key], ours[key]):
            yield f"{key} of the file is not that of {directory / 'tokenizer.json'}: {_first(theirs[key], ours[key])}"
    yield from _rope_difference(file, rope_factors(config))


def _rope_difference(file: GgufCheckpoint, expected: torch.Tensor | None) -> Iterator[str]:
    stored = next((tensor for tensor in file.header.tensors if tensor.name == ROPE_FACTORS), None)
    if (stored is None) != (expected is None):
        holds = "holds no" if stored is None else "holds"
        yield f"the file {holds} {ROPE_FACTORS}, which goes with rope_type llama3 and no other; see config.json"
    elif stored is not None and expected is not None and not _close(file, stored, expected):
        yield f"{ROPE_FACTORS} of the file are not the factors of the rope parameters of config.json"


def _close(file: GgufCheckpoint, stored: GgufTensor, expected: torch.Tensor) -> bool:
    if stored.kind != "F32" or stored.shape != tuple(expected.shape):
        return False
    return torch.allclose(file.values(stored), expected, rtol=FACTOR_TOLERANCE, atol=0)


def _same(one: Any, other: Any) -> bool:
    """Equal values; numbers that are not whole as float32, which is how the file holds them."""
    return bool(_stored(one) == _stored(other))


def _stored(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return float(np.float32(value)) if isinstance(value, float) else value


def _short(value: Any) -> str:
    return "nothing" if value is None else str(value)[:40]


def _first(theirs: Any, ours: Any) -> str:
    if not isinstance(theirs, list) or not isinstance(ours, list):
        return f"{_short(theirs)}, not {_short(ours)}"
    if len(theirs) != len(ours):
        return f"{len(theirs)} tokens, not {len(ours)}"
    place = next(index for index, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
    return f"token {place} is {theirs[place]!r}, not {ours[place]!r}"
