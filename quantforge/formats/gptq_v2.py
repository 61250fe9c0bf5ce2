"""GPTQ, always version 2: zeros are stored as they are (see `formats/gptq.py`, whose code this is)."""

from dataclasses import replace
from typing import Any

import torch

from quantforge.formats import CheckpointFacts
from quantforge.formats.gptq import FORMAT as GPTQ
from quantforge.quantized import QuantizedWeight


def encode(name: str, weight: QuantizedWeight, facts: CheckpointFacts) -> dict[str, torch.Tensor]:
    """The tensors of one site, by checkpoint key."""
    return GPTQ.encode(name, weight, _version_2(facts))


def config(facts: CheckpointFacts) -> dict[str, Any]:
    """That of `gptq` with ``checkpoint_format: gptq_v2``."""
    return GPTQ.config(_version_2(facts))


def side_files(facts: CheckpointFacts) -> dict[str, dict[str, Any]]:
    """quantize_config.json."""
    return GPTQ.side_files(_version_2(facts))


def _version_2(facts: CheckpointFacts) -> CheckpointFacts:
    """Facts of a checkpoint that version 1 cannot hold."""
    return replace(facts, has_zero_zero=True)


FORMAT = replace(
    GPTQ,
    name="gptq-v2",
    summary="GPTQ v2 whatever the zeros are: vLLM, SGLang, GPTQModel, transformers",
    encode=encode,
    config=config,
    side_files=side_files,
)
