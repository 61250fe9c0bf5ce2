"""Damages to checkpoints, and what is found of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quantforge.model.packed import open_any
from quantforge.model.shards import SINGLE_FILE
from quantforge.pipeline.examine import examine

EXPECTED = {("warning", "tokenizer-missing", "tokenizer.json")}  # the tiny checkpoints have none

Found = set[tuple[str, str, str]]


def found(path: Path, reference: Path | None = None) -> Found:
    """Severity, code and place of everything that is found and not expected."""
    findings = examine(path, reference).findings
    return {(finding.severity, finding.code, finding.where) for finding in findings} - EXPECTED


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def settings(path: Path, **values: Any) -> None:
    """Set keys of the quantization_config, in all its copies."""
    edit(path / "config.json", lambda config: config["quantization_config"].update(values))
    if (path / "quantize_config.json").exists():
        edit(path / "quantize_config.json", lambda config: config.update(values))


def tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object], file: str = SINGLE_FILE) -> None:
    content = load_file(path / file)
    change(content)
    save_file(content, path / file, {"format": "pt"})


def weights(path: Path) -> dict[str, torch.Tensor]:
    source = open_any(path)
    return {key: source.read(key) for key in source.keys()}  # noqa: SIM118  (not a dict)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
