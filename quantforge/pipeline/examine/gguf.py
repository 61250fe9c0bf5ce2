"""A directory with a GGUF file: whether it can be read, and whether what it holds are numbers."""

from collections.abc import Iterator
from pathlib import Path

import torch

from quantforge.errors import SourceError
from quantforge.model.gguf_file import GgufCheckpoint, gguf_files, open_gguf
from quantforge.pipeline.examine.findings import Finding, error, refused


def open_gguf_of(path: Path, findings: list[Finding]) -> GgufCheckpoint | None:
    """The GGUF file of a directory, when it has one and no safetensors; what cannot be read is a finding."""
    files = gguf_files(path)
    if not files or any(path.glob("*.safetensors")):
        return None
    try:
        return open_gguf(path)
    except SourceError as fault:
        findings.append(error("gguf", files[0].name, str(fault)))
        return None


def check_values(source: GgufCheckpoint) -> Iterator[Finding]:
    """Tensors with values that are no numbers, as the package ``gguf`` dequantizes them."""
    for key in source.keys():  # noqa: SIM118  (not a dict)
        try:
            values = source.read(key)
        except SourceError as fault:
            yield refused(fault, key)
            continue
        if bad := int((~torch.isfinite(values)).sum()):
            yield error("not-finite", key, f"{key}: {bad} of {values.numel()} values are NaN or infinite")
