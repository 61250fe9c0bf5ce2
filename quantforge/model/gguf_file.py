"""A directory with a GGUF file, seen as a float checkpoint under the names of transformers.

Written from llama.cpp's conventions, dequantized by the package ``gguf``; shares no code with `formats/gguf`.
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
from quantforge.model.gguf_header import GgufHeader, GgufTensor, read_gguf_header
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


@dataclass(frozen=True)
class GgufCheckpoint:
    """Implements `source.TensorSource`. Build it with `open_gguf`.

    Attributes:
        path: the directory of config.json.
        config: config.json beside the file.
        file: the GGUF file.
        tensors: by checkpoint key, in the order of the file.
        header: what the file says of itself.
    """

    path: Path
    config: dict[str, Any]
    file: Path
    tensors: dict[str, GgufTensor]
    header: GgufHeader = field(repr=False)

    def keys(self) -> list[str]:
        return list(self.tensors)

    def is_packed(self, key: str) -> bool:
        return self.tensors[key].kind not in FLOATS

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.total_bytes for tensor in self.tensors.values())

    def read(self, key: str) -> torch.Tensor:
        """A tensor in its stored dtype; blocks become float32 [out, in]. Rows are in the order of transformers.

        Raises SourceError when the file ends early, or for blocks that the package gguf cannot dequantize.
        """
        return self._turned_back(self.tensors[key], self.values(self.tensors[key]))

    def values(self, tensor: GgufTensor) -> torch.Tensor:
        """What `read` gives, of any tensor of the file, rows in the file's order."""
        raw = self._bytes(tensor)
        if tensor.kind in FLOATS:
            return raw.view(FLOATS[tensor.kind]).reshape(tensor.shape)
        gguf = need("gguf", "reading a GGUF file")
        try:
            with np.errstate(all="ignore"):  # what is not finite is for those who look
                values = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[tensor.kind])
        except NotImplementedError as error:
            raise SourceError(f"{self.file}: {tensor.name} has the type {tensor.kind}: {error}") from error
        return torch.from_numpy(values)

    def rows(self, key: str) -> torch.Tensor:
        """The blocks of a matrix, uint8 [out, bytes of a row], rows in the order of transformers."""
        return self._turned_back(self.tensors[key], self._bytes(self.tensors[key]))

    def _bytes(self, tensor: GgufTensor) -> torch.Tensor:
        """uint8 [..., bytes of a row]."""
        buffer = torch.empty(tensor.total_bytes, dtype=torch.uint8)
        with opened(self.file) as handle:
            handle.seek(tensor.start)
            got = handle.readinto(buffer.numpy().data)
        if got != tensor.total_bytes:
            raise SourceError(f"{self.file}: {tensor.name} ends after {got} of {tensor.total_bytes} bytes")
        return buffer.reshape(*tensor.shape[:-1], -1)

    def _turned_back(self, tensor: GgufTensor, values: torch.Tensor) -> torch.Tensor:
        """Rows of q and k with rotary halves apart again, where the architecture has them as neighbors."""
        module = tensor.name.split(".")[-2]
        if self.architecture not in TURNED or module not in ("attn_q", "attn_k"):
            return values
        key = f"{self.architecture}.attention.head_count" + "_kv" * (module == "attn_k")
        heads = self.field(key)
        if type(heads) is not int or heads < 1 or len(values) % (2 * heads):
            raise SourceError(f"{self.file}: {key} is {str(heads)[:80]}, {tensor.name} has {len(values)} rows")
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])  # [heads, size / 2, 2, ...]
        return pairs.transpose(1, 2).reshape(values.shape)

    @cached_property
    def architecture(self) -> str:
        """llama.cpp's name for the kind of model."""
        return str(self.field("general.architecture"))

    def field(self, key: str) -> Any:
        """One value of the file's metadata; SourceError when it is not there."""
        if key not in self.header.metadata:
            raise SourceError(f"{self.file} does not say {key}")
        return self.header.metadata[key]


def is_gguf_file(path: Path) -> bool:
    """Whether a path is a file that is called a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def gguf_files(path: Path) -> list[Path]:
    """The GGUF files of a directory, sorted."""
    return sorted(path.glob("*.gguf")) if path.is_dir() else []


def open_gguf(path: Path, config: Path | None = None) -> GgufCheckpoint:
    """Open a GGUF file, or a directory that holds one; `config` is the directory of config.json, where it is another.

    Raises SourceError for several files, a damaged one, and one with tensors of an architecture not known here.
    """
    files = [path] if path.is_file() else gguf_files(path)
    if len(files) != 1:
        raise SourceError(f"{path} holds {len(files)} GGUF files, not one: {', '.join(file.name for file in files)}")
    header = read_gguf_header(files[0])
    tensors: dict[str, GgufTensor] = {}
    unknown = []
    for tensor in header.tensors:
        match = _NAME.fullmatch(tensor.name)
        if tensor.name in NO_PARAMETER:
            continue
        if match is None or match[2] not in MODULES:
            unknown.append(tensor.name)
            continue
        if tensor.kind not in FLOATS and len(tensor.shape) != 2:
            raise SourceError(f"{files[0]}: {tensor.name} is {tensor.kind} and no matrix: {list(tensor.shape)}")
        prefix = "" if match[1] is None else f"model.layers.{match[1]}."
        tensors[f"{prefix}{MODULES[match[2]]}.{match[3]}"] = tensor
    if unknown:
        raise SourceError(f"{files[0]} holds {len(unknown)} tensors of unknown names: {', '.join(unknown[:3])}")
    directory = config or files[0].parent
    return GgufCheckpoint(directory, read_config(directory), files[0], tensors, header)
