"""Re-open a written GGUF file with the package's own reader and require exactly what was to be written."""

from collections.abc import Iterator
from pathlib import Path

import torch

from quantforge.errors import SourceError
from quantforge.model.gguf_file import FLOATS, GgufCheckpoint, open_gguf
from quantforge.pipeline.contents import Contents

NO_WEIGHTS = ("rotary_emb.inv_freq",)
STATED = {  # metadata -> config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}


def check_gguf(directory: Path, contents: Contents) -> tuple[list[str], int]:
    """Every mismatch between the file and what it was made from, and how many tensors it holds.

    Weights are what the package ``gguf`` dequantizes, in the checkpoint's order of rows; they must equal the grid's bit
    for bit. Other tensors keep their dtype, except that vectors become float32.
    """
    try:
        written = open_gguf(directory)
    except SourceError as error:
        return [str(error)], 0
    problems = []
    sites = {f"{name}.weight": name for name in contents.shapes}
    left_out = {*contents.packed, *contents.unused}
    copied = {key for key in contents.source.tensors if key not in left_out and not key.endswith(NO_WEIGHTS)}
    problems += [f"{key}: missing" for key in sorted((copied | sites.keys()) - written.tensors.keys())]
    problems += [f"{key}: nobody asked for it" for key in sorted(written.tensors.keys() - copied - sites.keys())]
    for key in written.tensors:
        if key in sites and not written.is_packed(key):
            problems.append(f"{key}: planned as blocks, written as {written.tensors[key].kind}")
        elif key in sites and not torch.equal(written.read(key), contents.expected(sites[key]).dequantize()):
            problems.append(f"{key}: different dequantized weights")
        elif key in copied:
            changed = key in contents.changed
            source = contents.tensor(key) if changed else contents.source.read(key)
            if not _same(written, key, source):
                problems.append(f"{key}: differs from {'what the transform made of it' if changed else 'the source'}")
    return problems + list(_misstated(written, contents)), len(written.tensors)


def _same(written: GgufCheckpoint, key: str, source: torch.Tensor) -> bool:
    kept = torch.float32 if source.ndim == 1 else source.dtype
    found = written.read(key)
    same_dtype = FLOATS.get(written.tensors[key].kind) == kept
    return same_dtype and found.shape == source.shape and torch.equal(found, source.to(kept))


def _misstated(written: GgufCheckpoint, contents: Contents) -> Iterator[str]:
    for stated, key in STATED.items():
        found = written.field(f"{written.architecture}.{stated}")
        if found != contents.config.get(key):
            yield f"the file states {stated} {found}, config.json {key} {contents.config.get(key)}"
    tokens = len(written.field("tokenizer.ggml.tokens"))
    if tokens != contents.config.get("vocab_size"):
        yield f"the file holds {tokens} tokens, config.json says {contents.config.get('vocab_size')}"
