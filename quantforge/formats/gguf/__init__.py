"""GGUF, the file format of llama.cpp: one file with the weights, the hyperparameters and the tokenizer.

Grids that a block type holds exactly are written as they are (`blocks.py`); nothing is rounded again. Llama and Qwen
models are known by name here, because llama.cpp has code of its own for each architecture (`architecture.py`).
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantforge.formats import NAMED_SITES, CheckpointFacts, Container, Format, SiteShape, sites_by_spec
from quantforge.formats.gguf.blocks import BLOCK, bits_per_weight, block_type, pack_blocks
from quantforge.formats.gguf.file import model_problems, write_file
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec


def problems(specs: Mapping[str, QuantSpec], sites: list[SiteShape]) -> list[str]:
    """Grids that no block type holds, and rows that are no whole number of blocks within each group."""
    found = []
    for spec, own in sites_by_spec(specs, sites).items():
        named = ", ".join(site.name for site in own[:NAMED_SITES])
        named += f" and {len(own) - NAMED_SITES} more" * (len(own) > NAMED_SITES)
        if block_type(spec) is None:
            found.append(
                f"no block type holds {spec.label()} exactly, only 4 bits symmetric (Q4_0) or asymmetric (Q4_1) and 8 "
                f"bits symmetric (Q8_0): {named}"
            )
        if spec.group_size is not None and spec.group_size % BLOCK:
            found.append(f"groups must be a multiple of {BLOCK}, the weights of a block; {spec.group_size}: {named}")
        ragged = [site for site in own if site.in_features % BLOCK]
        if ragged:
            shapes = ", ".join(f"{site.name} [{site.out_features}, {site.in_features}]" for site in ragged)
            found.append(
                f"in_features must be a multiple of {BLOCK}, which [out, in] is not at {shapes}; add these to ignore"
            )
    return found


def encode(name: str, weight: QuantizedWeight, facts: CheckpointFacts) -> dict[str, torch.Tensor]:
    """The blocks of one site, its rows in the checkpoint's order, uint8 [out, bytes of a row]."""
    return {f"{name}.weight": pack_blocks(weight, name)}


def config(facts: CheckpointFacts) -> dict[str, Any]:
    """Says that the weights beside config.json are a GGUF file, which describes itself."""
    return {"quant_method": "gguf"}


def side_files(facts: CheckpointFacts) -> dict[str, dict[str, Any]]:
    """None: everything is in the file."""
    return {}


FORMAT = Format(
    name="gguf",
    summary="GGUF blocks Q4_0, Q4_1, Q8_0 for Llama and Qwen models: llama.cpp and what is built on it",
    problems=problems,
    encode=encode,
    config=config,
    side_files=side_files,
    scale_dtype="float16",
    minima=True,
    container=Container(".gguf", model_problems, write_file, bits_per_weight),
)
