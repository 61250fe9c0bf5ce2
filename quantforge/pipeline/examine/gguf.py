"""A directory with a GGUF file: whether it can be read, and whether what it holds are numbers."""

from collections.abc import Iterator
from pathlib import Path

import torch

from quantforge.errors import SourceError, UsageError
from quantforge.model.gguf_file import GgufCheckpoint, gguf_files, open_gguf
from quantforge.model.pickles import PICKLE_SUFFIXES
from quantforge.model.shards import file_names
from quantforge.pipeline.examine.files import WEIGHTS_SUFFIX
from quantforge.pipeline.examine.findings import Finding, error, refused


def require_alone(file: Path) -> None:
    """UsageError for a GGUF file in a directory with weights of another kind."""
    if others := [name for name in file_names(file.parent) if name.endswith((WEIGHTS_SUFFIX, *PICKLE_SUFFIXES))]:
        raise UsageError(
            f"{file.parent} holds {others[0]} beside {file.name}, and config.json may be theirs; put the GGUF file and "
            "its config.json into a directory of their own"
        )


def open_gguf_of(path: Path, file: Path | None, findings: list[Finding]) -> GgufCheckpoint | None:
    """The GGUF `file`, or that of a directory that has one and no safetensors; what cannot be read is a finding."""
    files = gguf_files(path) if file is None else [file]
    if not files or any(path.glob("*.safetensors")):
        return None
    try:
        return open_gguf(file or path)
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
