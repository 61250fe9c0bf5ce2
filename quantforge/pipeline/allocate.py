"""Bits for every site from a budget: predicted losses, known costs, one choice; stored, so that it is made once."""

from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path

from quantforge.calibration import CalibrationSet
from quantforge.errors import PlanError
from quantforge.formats import load_format
from quantforge.numerics.knapsack import Option, Options, bounds, choose_bits
from quantforge.pipeline.budget import Cost, StoredBytes, Unit, code_bits, limit_of
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.sensitivity import Predictions, predict_kl
from quantforge.recipe import Recipe
from quantforge.report import Allocating, Allocation, Event, UnitBits

PREDICTION_TOKENS = 4096
TOKENS_PER_INPUT = 2
"""Of the calibration tokens, the first so many (in whole sequences) are used, and more for a wide input."""


def allocate_plan(
    recipe: Recipe, plan: Plan, calibration: CalibrationSet, directory: Path | None
) -> Generator[Event, None, Allocation]:
    """Choose bits for the units of a plan with a budget; `with_bits` puts them into the plan.

    Args:
        directory: where files of the size of the hidden states of all layers may be put for the time being; None keeps
            those in memory.

    Raises PlanError when no choice keeps the predicted KL below ``max_kl``.
    """
    wanted = max(PREDICTION_TOKENS, TOKENS_PER_INPUT * max(site.in_features for site in plan.sites))
    tokens = calibration.tokens[: -(-wanted // calibration.tokens.shape[1])]
    open_units = [unit for unit in plan.units if len(unit.bits) > 1 or recipe.max_kl is not None]
    candidates = {
        site.name: {bits: replace(plan.specs[site.name], bits=bits) for bits in unit.bits}
        for unit in open_units
        for site in unit.sites
    }
    steps = predict_kl(plan, tokens, candidates, directory)
    while True:
        try:
            done, total = next(steps)
        except StopIteration as stop:
            predicted: Predictions = stop.value
            break
        yield Allocating(done, total)
    return choose(recipe, plan, predicted, int(tokens.numel()))


def choose(recipe: Recipe, plan: Plan, predicted: Predictions, tokens: int) -> Allocation:
    """The choice for given predictions of sites; a site without any costs nothing, whatever its bits."""
    assert recipe.budget_label is not None
    stored = StoredBytes([load_format(name) for name in plan.formats], plan.specs)
    losses = {
        unit.name: {bits: sum(predicted[s.name][bits] for s in unit.sites if s.name in predicted) for bits in unit.bits}
        for unit in plan.units
    }
    cost: Cost = code_bits if recipe.avg_bits is not None else stored
    units: dict[str, Options] = {}
    for unit in plan.units:
        pairs = {bits: (cost(unit, bits), losses[unit.name][bits]) for bits in unit.bits}
        if recipe.max_kl is not None:  # the same problem with the two in each other's place
            pairs = {bits: (loss, size) for bits, (size, loss) in pairs.items()}
        units[unit.name] = {bits: Option(*pair) for bits, pair in pairs.items()}
    chosen = choose_bits(units, limit_of(recipe, plan.units, plan.rest_bytes))
    if chosen is None:
        least, most = bounds(units)
        raise PlanError(
            [f"--max-kl {recipe.max_kl} cannot be met: the predicted KL lies between {least:.4g} and {most:.4g}"]
        )
    return _allocation(recipe.budget_label, plan.units, chosen, losses, stored, plan.rest_bytes, tokens)


def _allocation(
    budget: str,
    units: tuple[Unit, ...],
    chosen: Mapping[str, int],
    losses: Mapping[str, Mapping[int, float]],
    stored: StoredBytes,
    rest_bytes: int,
    tokens: int,
) -> Allocation:
    return Allocation(
        budget=budget,
        mean_bits=sum(unit.weights * chosen[unit.name] for unit in units) / sum(unit.weights for unit in units),
        estimated_bytes=rest_bytes + round(sum(stored(unit, chosen[unit.name]) for unit in units)),
        predicted_kl=sum(losses[unit.name][chosen[unit.name]] for unit in units),
        tokens=tokens,
        units=tuple(
            UnitBits(
                unit=unit.name,
                sites=tuple(site.name for site in unit.sites),
                weights=unit.weights,
                bits=chosen[unit.name],
                predicted_kl={str(bits): loss for bits, loss in losses[unit.name].items()},
            )
            for unit in units
        ),
        warnings=tuple(
            f"{unit.name}: no calibration token reached it while bits were chosen, so that none seemed needed; "
            f"it got {chosen[unit.name]}; raise --nsamples, or set its bits by a rule"
            for unit in units
            if len(unit.bits) > 1 and not any(losses[unit.name].values())
        ),
    )


def with_bits(plan: Plan, allocation: Allocation) -> Plan:
    """The plan with the grids that were chosen."""
    bits = {name: unit.bits for unit in allocation.units for name in unit.sites}
    return replace(
        plan,
        specs={name: replace(spec, bits=bits[name]) for name, spec in plan.specs.items()},
        units=tuple(replace(unit, bits=(bits[unit.sites[0].name],)) for unit in plan.units),
    )
