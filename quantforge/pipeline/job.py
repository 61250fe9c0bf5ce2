"""A job: one output in the making, with its work directory open."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantforge.calibration import CalibrationSet
from quantforge.model.source import Checkpoint
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.workspace import Workspace
from quantforge.quantized import QuantizedWeight
from quantforge.recipe import Recipe
from quantforge.report import Allocation


@dataclass(frozen=True, eq=False)
class Job:
    """What solving, writing and publishing one output needs.

    Attributes:
        calibration: None when nothing is observed and no bits are chosen.
        fingerprint: everything the output's bytes depend on.
        allocation: with a budget, the bits that were chosen; `plan` has them then.
    """

    recipe: Recipe
    plan: Plan
    workspace: Workspace
    calibration: CalibrationSet | None
    fingerprint: Mapping[str, Any]
    allocation: Allocation | None = None

    @property
    def observed(self) -> bool:
        """Whether the inputs of its sites, or what its layers cache, are observed."""
        return self.calibration is not None and (self.plan.needs_gram or self.plan.kv_cache is not None)

    @property
    def unsolved(self) -> bool:
        """Whether layers are left to be solved."""
        return self.workspace.done() < self.plan.layers


def needs_tokens(recipe: Recipe, plan: Plan) -> bool:
    """Whether calibration tokens are needed: to observe inputs or a cache, to choose bits, or to tune scales."""
    observes = plan.needs_gram or plan.kv_cache is not None
    return observes or recipe.budget is not None or recipe.tune_epochs > 0


class Solved:
    """Implements `contents.Contents` over the committed layers of a run."""

    def __init__(self, plan: Plan, workspace: Workspace) -> None:
        source = plan.streamed.source
        assert isinstance(source, Checkpoint)
        self._plan, self._workspace = plan, workspace
        self._sites = {site.name: site for site in plan.sites}
        self._floats = workspace.floats()
        self.source = source
        self.config: Mapping[str, Any] = source.config
        self.shapes = {site.name: site.shape for site in plan.sites}
        self.specs = plan.specs
        self.activations = plan.activations
        self.packed = {f"{name}.weight": name for name in self._sites}
        self.changed = frozenset(self._floats)
        self.unused = frozenset(source.tensors.keys() - plan.checkpoint.tensors.keys())
        self.kv_cache = plan.kv_cache
        self.cache_scales = workspace.cache_scales()

    def weight(self, name: str) -> QuantizedWeight:
        """The committed site."""
        site = self._sites[name]
        return self._workspace.weight(site.layer, name, site.in_features)

    def expected(self, name: str) -> QuantizedWeight:
        """The same."""
        return self.weight(name)

    def tensor(self, key: str) -> torch.Tensor:
        """What a transform or the tuning made of a tensor."""
        return self._workspace.float_tensor(self._floats[key], key)
