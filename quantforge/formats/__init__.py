"""Checkpoint formats, the writing side. One file a format; the file's ``FORMAT`` is the registry entry.

To add a format, write ``formats/<name>.py`` with a module constant ``FORMAT: Format``, its independent reader in
``readers/``, and a golden-byte test. Dashes in a format's name are underscores in its file name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quantforge.errors import UsageError
from quantforge.quantized import QuantizedWeight
from quantforge.registry import load, names_in
from quantforge.spec import QuantSpec


@dataclass(frozen=True)
class SiteShape:
    """A site as a format sees it: `name` is the checkpoint name without ``.weight``.

    `kind` is ``linear`` (weights stored [out, in]) or ``conv1d`` (GPT-2 style, stored [in, out]).
    """

    name: str
    out_features: int
    in_features: int
    kind: str = "linear"


@dataclass(frozen=True)
class CheckpointFacts:
    """What a whole checkpoint's config depends on, known once every site is solved.

    Attributes:
        spec: the grid shared by all quantized sites.
        quantized: names of the quantized sites, checkpoint names without ``.weight``.
        kept: names of the Linear modules left in floating point, `lm_head` included when it exists.
        has_zero_zero: some group of some site has a zero of 0.
    """

    spec: QuantSpec
    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    has_zero_zero: bool


@dataclass(frozen=True)
class Format:
    """How quantized weights are laid out in a checkpoint. Plain functions, no state.

    Attributes:
        problems: every reason why these sites cannot be written in this format, empty when they can. Called before
            any weight is read.
        encode: (site name, weight, facts) -> tensors by full checkpoint key, ready to be written.
        config: the ``quantization_config`` object of config.json.
        side_files: further JSON files of the format by file name (for example ``quantize_config.json``).
    """

    name: str
    summary: str
    problems: Callable[[QuantSpec, list[SiteShape]], list[str]]
    encode: Callable[[str, QuantizedWeight, CheckpointFacts], dict[str, torch.Tensor]]
    config: Callable[[CheckpointFacts], dict[str, Any]]
    side_files: Callable[[CheckpointFacts], dict[str, dict[str, Any]]]


def format_names() -> list[str]:
    """Names of all formats, from the files of this folder."""
    return names_in(__path__)


def load_format(name: str) -> Format:
    """Import one format by name; raises UsageError naming the known ones."""
    found = load(__name__, __path__, name, "FORMAT", UsageError)
    assert isinstance(found, Format)
    return found
