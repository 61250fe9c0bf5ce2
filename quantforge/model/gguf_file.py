"""A directory with a GGUF file, seen as a float checkpoint under the names of transformers.

Written from llama.cpp's conventions and read with the package ``gguf``; shares no code with `formats/gguf`.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantforge.errors import SourceError
from quantforge.extras import need
from quantforge.model.shards import opened
from quantforge.model.source import read_config

MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NO_PARAMETER = {"rope_freqs.weight"}
TURNED = {"llama"}
"""Architectures whose rows of q and k are stored with rotary halves as neighbors."""

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """One tensor: `kind` is its type in the file (``F32``, ``Q4_0``, ...), `shape` that of its weights."""

    name: str
    kind: str
    shape: tuple[int, ...]
    total_bytes: int
    stored: Any = field(repr=False)


@dataclass(frozen=True)
class GgufCheckpoint:
    """Implements `source.TensorSource`. Build it with `open_gguf`.

    Attributes:
        path: the directory.
        config: config.json beside the file.
        file: the GGUF file.
        tensors: by checkpoint key, in the order of the file.
        reader: the ``gguf.GGUFReader``; the file is mapped, not loaded.
    """

    path: Path
    config: dict[str, Any]
    file: Path
    tensors: dict[str, GgufTensor]
    reader: Any = field(repr=False)

    def keys(self) -> list[str]:
        return list(self.tensors)

    def is_packed(self, key: str) -> bool:
        return self.tensors[key].kind not in FLOATS

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.total_bytes for tensor in self.tensors.values())

    def read(self, key: str) -> torch.Tensor:
        """A tensor in its stored dtype; blocks become float32 [out, in]. Rows are in the order of transformers."""
        tensor = self.tensors[key]
        if tensor.kind in FLOATS:
            raw = torch.from_numpy(np.array(tensor.stored).view(np.uint8).reshape(-1))
            values = raw.view(FLOATS[tensor.kind]).reshape(tensor.shape)
        else:
            gguf = need("gguf", "reading a GGUF file")
            values = torch.from_numpy(gguf.quants.dequantize(tensor.stored, gguf.GGMLQuantizationType[tensor.kind]))
        module = tensor.name.split(".")[-2]
        if self.architecture not in TURNED or module not in ("attn_q", "attn_k"):
            return values
        heads = self.field(f"{self.architecture}.attention.head_count" + "_kv" * (module == "attn_k"))
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])  # [heads, size / 2, 2, ...]
        return pairs.transpose(1, 2).reshape(values.shape)

    @cached_property
    def architecture(self) -> str:
        """llama.cpp's name for the kind of model."""
        return str(self.field("general.architecture"))

    def field(self, key: str) -> Any:
        """One value of the file's metadata; SourceError when it is not there."""
        found = self.reader.get_field(key)
        if found is None:
            raise SourceError(f"{self.file} does not say {key}")
        return found.contents()


def gguf_files(path: Path) -> list[Path]:
    """The GGUF files of a directory, sorted."""
    return sorted(path.glob("*.gguf")) if path.is_dir() else []


def open_gguf(path: Path) -> GgufCheckpoint:
    """Open a directory that holds one GGUF file and config.json.

    Raises SourceError for several files, a damaged one, and one with tensors of an architecture not known here.
    """
    gguf = need("gguf", "reading a GGUF file")
    files = gguf_files(path)
    if len(files) != 1:
        raise SourceError(f"{path} holds {len(files)} GGUF files, not one: {', '.join(file.name for file in files)}")
    with opened(files[0]):
        pass  # refuses what may not be read
    try:
        reader = gguf.GGUFReader(files[0])
    except (OSError, ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise SourceError(f"{files[0]} is truncated or no GGUF file: {error}") from error
    tensors: dict[str, GgufTensor] = {}
    unknown = []
    for stored in reader.tensors:
        match = _NAME.fullmatch(stored.name)
        if stored.name in NO_PARAMETER:
            continue
        if match is None or match[2] not in MODULES:
            unknown.append(stored.name)
            continue
        prefix = "" if match[1] is None else f"model.layers.{match[1]}."
        shape = tuple(int(size) for size in reversed(stored.shape.tolist()))
        tensors[f"{prefix}{MODULES[match[2]]}.{match[3]}"] = GgufTensor(
            stored.name, stored.tensor_type.name, shape, int(stored.n_bytes), stored.data
        )
    if unknown:
        raise SourceError(f"{files[0]} holds {len(unknown)} tensors of unknown names: {', '.join(unknown[:3])}")
    return GgufCheckpoint(path, read_config(path), files[0], tensors, reader)
