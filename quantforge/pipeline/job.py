"""A job: one output in the making, with its work directory open."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quantforge.calibration import CalibrationSet
from quantforge.model.sites import LinearSite
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.workspace import Workspace
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
        """Whether the inputs of its sites are observed."""
        return self.calibration is not None and self.plan.needs_gram

    @property
    def unsolved(self) -> bool:
        """Whether layers are left to be solved."""
        return self.workspace.done() < self.plan.layers

    def sites_of(self, layer: int) -> dict[str, LinearSite]:
        """The sites of one layer, by module path."""
        return {site.module: site for site in self.plan.sites if site.layer == layer}

    def modules_of(self, layer: int) -> dict[str, nn.Module]:
        """Their modules, by path."""
        return {name: self.plan.streamed.model.get_submodule(name) for name in self.sites_of(layer)}


def work_directory(plan: Plan) -> Path:
    """Where unfinished work is kept: beside the output."""
    return plan.output.parent / f"{plan.output.name}.partial"


def needs_tokens(recipe: Recipe, plan: Plan) -> bool:
    """Whether calibration tokens are needed: to observe inputs, to choose bits, or to tune scales."""
    return plan.needs_gram or recipe.budget is not None or recipe.tune_epochs > 0
