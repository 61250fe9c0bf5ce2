"""Checkpoint formats, the writing side. One file a format; the file's ``FORMAT`` is the registry entry.

To add a format, write ``formats/<name>.py`` with a module constant ``FORMAT: Format``, its independent reader in
``readers/``, and a golden-byte test. Dashes in a format's name are underscores in its file name.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quantforge.errors import UsageError
from quantforge.quantized import QuantizedWeight
from quantforge.registry import load, names_in
from quantforge.spec import ActivationSpec, QuantSpec


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
        specs: the grid of each quantized site, by its checkpoint name without ``.weight``; never empty.
        kept: names of the Linear modules left in floating point, `lm_head` included when it exists.
        has_zero_zero: some group of some site has a zero of 0.
        modules: the module path of each site whose checkpoint name is another.
        activations: the grid of the sites' inputs, None when they stay in floating point.
    """

    specs: Mapping[str, QuantSpec]
    kept: tuple[str, ...]
    has_zero_zero: bool
    modules: Mapping[str, str] = field(default_factory=dict)
    activations: ActivationSpec | None = None

    def by_spec(self) -> dict[QuantSpec, list[str]]:
        """Each distinct grid with the names of its sites, checkpoint and module names; the commonest first."""
        names: dict[QuantSpec, list[str]] = {spec: [] for spec, _ in Counter(self.specs.values()).most_common()}
        for name, spec in self.specs.items():
            names[spec] += dict.fromkeys((name, self.modules.get(name, name)))
        return names


@dataclass(frozen=True)
class Format:
    """How quantized weights are laid out in a checkpoint. Plain functions, no state.

    Attributes:
        problems: every reason why these sites, with the grid of each by name, cannot be written in this format; empty
            when they can. Called before any weight is read.
        encode: (site name, weight, facts) -> tensors by full checkpoint key, ready to be written.
        config: the ``quantization_config`` object of config.json.
        activations: True when it can say that the inputs of sites are quantized too.
        side_files: further JSON files of the format by file name (for example ``quantize_config.json``).
    """

    name: str
    summary: str
    problems: Callable[[Mapping[str, QuantSpec], list[SiteShape]], list[str]]
    encode: Callable[[str, QuantizedWeight, CheckpointFacts], dict[str, torch.Tensor]]
    config: Callable[[CheckpointFacts], dict[str, Any]]
    side_files: Callable[[CheckpointFacts], dict[str, dict[str, Any]]]
    activations: bool = False


def sites_by_spec(specs: Mapping[str, QuantSpec], sites: Iterable[SiteShape]) -> dict[QuantSpec, list[SiteShape]]:
    """The sites of each distinct grid."""
    found: dict[QuantSpec, list[SiteShape]] = {}
    for site in sites:
        found.setdefault(specs[site.name], []).append(site)
    return found


def format_names() -> list[str]:
    """Names of all formats, from the files of this folder."""
    return names_in(__path__)


def load_format(name: str) -> Format:
    """Import one format by name; raises UsageError naming the known ones."""
    return load(__name__, __path__, name, "FORMAT", Format, UsageError)
