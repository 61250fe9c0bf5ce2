"""The file itself, written with the package ``gguf``, one tensor in memory at a time."""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quantforge.errors import UsageError
from quantforge.formats import Source, Written
from quantforge.formats.gguf.architecture import (
    ARCHITECTURES,
    add_hyperparameters,
    config_problems,
    gguf_package,
    rope_factors,
    row_order,
    tensor_names,
)
from quantforge.formats.gguf.blocks import BLOCK, BLOCK_BYTES, block_type, pack_blocks
from quantforge.formats.gguf.vocabulary import add_vocabulary, vocabulary_problems
from quantforge.quantized import QuantizedWeight

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROPE_FACTORS = "rope_freqs.weight"
NAMED = 3


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file: `key` its name in the checkpoint, `kind` its type in the file, `shape` in weights."""

    key: str
    name: str
    kind: str
    shape: tuple[int, ...]
    site: bool = False

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """[..., bytes of a row]."""
        row = self.shape[-1]
        width = row // BLOCK * BLOCK_BYTES[self.kind] if self.site else row * FLOATS[self.kind].itemsize
        return (*self.shape[:-1], width)


def model_problems(source: Source, sites: Collection[str], left_out: Collection[str]) -> list[str]:
    """Every reason why a model cannot be written as GGUF, whatever its grids; see `Container.problems`."""
    config = source.config
    try:
        gguf_package()
    except UsageError as error:
        return [str(error)]
    if problems := list(config_problems(config)):
        return problems
    copied = [key for key in source.tensors if key not in left_out]
    names = tensor_names(config, [*copied, *(f"{site}.weight" for site in sites)])
    unnamed = [key for key, name in names.items() if name is None]
    if unnamed:
        architecture = ARCHITECTURES[config["model_type"]]
        problems.append(f"llama.cpp's {architecture} has no place for {len(unnamed)} tensors: {_some(unnamed)}")
    odd = [f"{key} {source.tensors[key].dtype}" for key in copied if source.tensors[key].dtype not in FLOATS]
    if odd:
        problems.append(f"tensors must be {', '.join(FLOATS)}; {len(odd)} are not: {_some(odd)}")
    return problems + list(vocabulary_problems(source.path, config["vocab_size"]))


def _some(items: list[str]) -> str:
    return ", ".join(items[:NAMED]) + ", ..." * (len(items) > NAMED)


def write_file(file: Path, written: Written) -> None:
    """Write weights, hyperparameters and tokenizer into `file`."""
    gguf = gguf_package()
    config = written.source.config
    entries = sorted(_entries(written), key=_place)
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config["model_type"]])
    writer.add_type("model")
    writer.add_name(str(config.get("_model_name_or_path") or (config.get("architectures") or ["model"])[0]))
    parameters = sum(int(np.prod(entry.shape)) for entry in entries)
    writer.add_size_label(gguf.size_label(parameters, parameters, 0, 0))
    add_hyperparameters(writer, config)
    commonest, _ = Counter(entry.kind for entry in entries if entry.site).most_common(1)[0]
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{commonest}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, written.source.path, config["vocab_size"])
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.kind]
        nbytes = int(np.prod(entry.byte_shape))
        writer.add_tensor_info(entry.name, entry.byte_shape, np.dtype(np.uint8), nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(_bytes(entry, written).numpy())
        writer.flush()
    finally:
        writer.close()


def _place(entry: _Entry) -> tuple[int, str]:
    """Layer after layer, whatever the order of the source."""
    layer = re.match(r"blk\.(\d+)\.", entry.name)
    return (-1 if layer is None else int(layer[1]), entry.name)


def _entries(written: Written) -> Iterator[_Entry]:
    """Tensors that stay as they are (vectors become F32, as llama.cpp wants them), then the sites."""
    source = written.source
    sites = {f"{name}.weight": name for name in written.shapes}
    copied = [key for key in source.tensors if key not in written.packed and key not in written.unused]
    names = tensor_names(source.config, [*copied, *sites])
    for key in copied:
        info, name = source.tensors[key], names.get(key)
        if name is not None:
            yield _Entry(key, name, "F32" if len(info.shape) == 1 else info.dtype, tuple(info.shape))
    factors = rope_factors(source.config)
    if factors is not None:
        yield _Entry(ROPE_FACTORS, ROPE_FACTORS, "F32", tuple(factors.shape))
    for key, site in sites.items():
        shape, kind, name = written.shapes[site], block_type(written.specs[site]), names[key]
        assert kind is not None and name is not None
        yield _Entry(key, name, kind, (shape.out_features, shape.in_features), site=True)


def _bytes(entry: _Entry, written: Written) -> torch.Tensor:
    """The bytes of one tensor, uint8 of the entry's `byte_shape`, rows in llama.cpp's order."""
    config = written.source.config
    order = row_order(config, entry.key)
    if entry.site:
        name = entry.key.removesuffix(".weight")
        weight = written.weight(name)
        return pack_blocks(weight if order is None else _reordered(weight, order), name)
    if entry.key == ROPE_FACTORS:
        factors = rope_factors(config)
        assert factors is not None
        return factors.view(torch.uint8)
    tensor = written.tensor(entry.key) if entry.key in written.changed else written.source.read(entry.key)
    tensor = tensor.to(FLOATS[entry.kind])
    return (tensor if order is None else tensor[order]).contiguous().view(torch.uint8)


def _reordered(weight: QuantizedWeight, order: torch.Tensor) -> QuantizedWeight:
    return QuantizedWeight(weight.spec, weight.codes[order], weight.scale[order], weight.zero[order])
