"""Budgets: which bits each unit of sites may get, what they cost, what is out of reach; known from headers alone."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quantforge.formats import Format
from quantforge.model.sites import LinearSite
from quantforge.numerics.knapsack import Option, bounds
from quantforge.patterns import FUSED
from quantforge.pipeline.grids import matches
from quantforge.pipeline.stored import site_bytes
from quantforge.recipe import Recipe
from quantforge.sizes import parse_size
from quantforge.spec import QuantSpec

CANDIDATES = (3, 4, 8)
SPARE_CANDIDATE = 2
"""Tried only when it is asked for or nothing else fits: below 3 bits the loss is no longer what is predicted of it."""

_EXPERT = re.compile(r"(.*\.experts)\.\d+\..*")


@dataclass(frozen=True)
class Unit:
    """Sites that get the same bits, because servers fuse them into one matrix or one kernel.

    Attributes:
        bits: what may be chosen; more than one, unless a rule has settled it.
    """

    name: str
    sites: tuple[LinearSite, ...]
    bits: tuple[int, ...]

    @property
    def weights(self) -> int:
        return sum(site.out_features * site.in_features for site in self.sites)


def group_sites(sites: Iterable[LinearSite]) -> dict[str, tuple[LinearSite, ...]]:
    """The sites of each unit, by a name such as ``model.layers.0.self_attn.q_proj+k_proj+v_proj``.

    A part of a fused set whose other parts stay in floating point is a unit by itself.
    """
    found: dict[str, list[LinearSite]] = {}
    for site in sites:
        parent, dot, leaf = site.name.rpartition(".")
        fused = next((parts for parts in FUSED.values() if leaf in parts), None)
        expert = _EXPERT.fullmatch(site.name)
        key = expert[1] if expert else f"{parent}{dot}{'+'.join(fused)}" if fused else site.name
        found.setdefault(key, []).append(site)
    return {members[0].name if len(members) == 1 else key: tuple(members) for key, members in found.items()}


def plan_units(
    recipe: Recipe,
    sites: Sequence[LinearSite],
    specs: Mapping[str, QuantSpec],
    formats: Sequence[Format],
    rest_bytes: int,
    problems: list[str],
    notes: list[str],
) -> tuple[Unit, ...]:
    """The units of a recipe with a budget; what is wrong is added to `problems`.

    Args:
        specs: the grid of each site; its bits count only where a rule names them.
        rest_bytes: bytes of the tensors that are not quantized.
    """
    assert recipe.budget is not None
    candidates = _supported(recipe, sites, specs, formats, problems, notes)
    if problems:
        return ()
    units = _with_bits(recipe, sites, specs, candidates, problems)
    if out_of_reach(recipe, units, specs, formats, rest_bytes) and not recipe.candidate_bits and not problems:
        spare = _supported(recipe, sites, specs, formats, problems, notes, (SPARE_CANDIDATE,))
        units = _with_bits(recipe, sites, specs, (*spare, *candidates), problems)
    if not problems and (problem := out_of_reach(recipe, units, specs, formats, rest_bytes)):
        problems.append(problem)
    return units


def _supported(
    recipe: Recipe,
    sites: Sequence[LinearSite],
    specs: Mapping[str, QuantSpec],
    formats: Sequence[Format],
    problems: list[str],
    notes: list[str],
    offered: tuple[int, ...] = CANDIDATES,
) -> tuple[int, ...]:
    """Candidate bits that every format can hold; those that were asked for and cannot be held are problems."""
    shapes = [site.shape for site in sites]
    supported = []
    for bits in recipe.candidate_bits or offered:
        grids = {name: spec if _settled(recipe, name) else replace(spec, bits=bits) for name, spec in specs.items()}
        unfit = [f"{chosen.name}: {problem}" for chosen in formats for problem in chosen.problems(grids, shapes)]
        if not unfit:
            supported.append(bits)
        elif recipe.candidate_bits:
            problems += unfit
        else:
            notes.append(f"{bits} bits are no choice here: {unfit[0]}")
    if not supported and not problems:
        problems.append(f"{', '.join(recipe.formats)}: none of {', '.join(map(str, offered))} bits fits all sites")
    return tuple(supported)


def _settled(recipe: Recipe, name: str) -> bool:
    """True when a rule says how many bits a site gets."""
    rule = next((rule for rule in recipe.rules if matches(rule.match, name, "--rule")), None)
    return rule is not None and rule.bits is not None


def _with_bits(
    recipe: Recipe,
    sites: Sequence[LinearSite],
    specs: Mapping[str, QuantSpec],
    candidates: tuple[int, ...],
    problems: list[str],
) -> tuple[Unit, ...]:
    units = []
    for name, members in group_sites(sites).items():
        settled = {specs[site.name].bits for site in members if _settled(recipe, site.name)}
        if len(settled) > 1:
            listed = ", ".join(map(str, sorted(settled)))
            problems.append(f"rules give {listed} bits within {name}, and servers need one grid for all of it")
        units.append(Unit(name, members, tuple(sorted(settled or candidates))))
    return tuple(units)


# ------------------------------------------------------------------------------------------------ costs


Cost = Callable[[Unit, int], float]


def code_bits(unit: Unit, bits: int) -> float:
    """Bits of all codes of a unit."""
    return float(unit.weights * bits)


class StoredBytes:
    """Bytes of a unit's tensors in an export, of the largest one when there are several formats."""

    def __init__(self, formats: Sequence[Format], specs: Mapping[str, QuantSpec]) -> None:
        self.formats = formats
        self.specs = specs

    def __call__(self, unit: Unit, bits: int) -> float:
        return float(sum(self._site(site, replace(self.specs[site.name], bits=bits)) for site in unit.sites))

    def _site(self, site: LinearSite, spec: QuantSpec) -> int:
        return max(site_bytes(chosen, spec, site.out_features, site.in_features) for chosen in self.formats)


def limit_of(recipe: Recipe, units: Sequence[Unit], rest_bytes: int) -> float:
    """The limit in terms of the cost that goes with the budget."""
    if recipe.avg_bits is not None:
        return recipe.avg_bits * sum(unit.weights for unit in units)
    if recipe.fit is not None:
        return float(parse_size(recipe.fit) - rest_bytes)
    assert recipe.max_kl is not None
    return recipe.max_kl


def out_of_reach(
    recipe: Recipe,
    units: Sequence[Unit],
    specs: Mapping[str, QuantSpec],
    formats: Sequence[Format],
    rest_bytes: int,
) -> str | None:
    """Why no choice can meet the budget, with what can be reached; None for a KL, which headers do not tell."""
    if recipe.max_kl is not None:
        return None
    cost: Cost = code_bits if recipe.avg_bits is not None else StoredBytes(formats, specs)
    least, most = bounds({u.name: {bits: Option(cost(u, bits), 0.0) for bits in u.bits} for u in units})
    if least <= limit_of(recipe, units, rest_bytes):
        return None
    offered = ", ".join(map(str, sorted({bits for unit in units for bits in unit.bits})))
    if recipe.avg_bits is not None:
        weights = sum(unit.weights for unit in units)
        reach = f"{least / weights:.4g} to {most / weights:.4g} bits a weight"
    else:
        reach = f"{(least + rest_bytes) / 1e6:.3f} MB to {(most + rest_bytes) / 1e6:.3f} MB"
    flag = "--avg-bits" if recipe.avg_bits is not None else "--fit"
    return f"{flag} {recipe.avg_bits or recipe.fit} cannot be met: with {offered} bits there is {reach}"
