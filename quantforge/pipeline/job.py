"""A job: one output in the making, with its work directory open."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.calibration import CalibrationSet
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


def needs_tokens(recipe: Recipe, plan: Plan) -> bool:
    """Whether calibration tokens are needed: to observe inputs, to choose bits, or to tune scales."""
    return plan.needs_gram or recipe.budget is not None or recipe.tune_epochs > 0
