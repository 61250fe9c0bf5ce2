"""Quantized checkpoints made by hand: random codes, packed by a format, around the other tensors of a model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from random_grids import random_weight
from safetensors.torch import load_file, save_file

from quantforge.formats import CheckpointFacts, load_format
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.quantized import QuantizedWeight
from quantforge.spec import ActivationSpec, QuantSpec


def pack(
    model: Path,
    path: Path,
    format_name: str,
    grid: QuantSpec | Callable[[str, int, int], QuantizedWeight],
    *,
    lowest_zero: int = 0,
    head: bool = False,
    activations: ActivationSpec | None = None,
) -> dict[str, QuantizedWeight]:
    """Write `path` as a quantized copy of a float checkpoint in one file; returns its weights by site.

    `grid` is that of every site, or makes a site's weight from its name, out_features and in_features. `head`
    quantizes ``lm_head`` too.
    """
    layout = StreamedModel(open_checkpoint(model)).layout
    tensors = load_file(model / "model.safetensors")
    shapes = {site.name: (site.out_features, site.in_features) for site in layout.sites}
    if head:
        rows, columns = tensors["lm_head.weight"].shape
        shapes["lm_head"] = (rows, columns)
    weights = {
        name: random_weight(grid, *shape, lowest_zero=lowest_zero)
        if isinstance(grid, QuantSpec)
        else grid(name, *shape)
        for name, shape in shapes.items()
    }
    facts = CheckpointFacts(
        specs={name: weight.spec for name, weight in weights.items()},
        kept=tuple(name for name in layout.kept_linears if name not in weights),
        has_zero_zero=any(bool((weight.zero == 0).any()) for weight in weights.values()),
        activations=activations,
        act_order=any(weight.group_index is not None for weight in weights.values()),
    )
    chosen = load_format(format_name)
    for name, weight in weights.items():
        del tensors[f"{name}.weight"]
        tensors |= chosen.encode(name, weight, facts)
    shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    edit_config(path, quantization_config=chosen.config(facts))
    for file, content in chosen.side_files(facts).items():
        (path / file).write_text(json.dumps(content))
    return weights


def edit_config(path: Path, **changes: Any) -> None:
    """Set keys of config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def edit_quantization(path: Path, **changes: Any) -> None:
    """Set keys of its quantization_config."""
    edit_config(path, quantization_config=quantization_of(path) | changes)


def quantization_of(path: Path) -> dict[str, Any]:
    """The quantization_config of config.json."""
    found: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization_config"]
    return found


def in_other_order(weight: QuantizedWeight) -> QuantizedWeight:
    """The same codes, with inputs dealt to groups in turn: input i is in group i modulo their count."""
    groups = weight.scale.shape[1]
    return replace(weight, group_index=torch.arange(weight.in_features) % groups)
