"""Which sites are quantized and on which grid: `ignore`, `rules` and group sizes of a recipe, and what servers fuse."""

import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantforge.errors import UsageError
from quantforge.model.sites import LinearSite, ModelLayout
from quantforge.patterns import FUSED
from quantforge.recipe import Recipe
from quantforge.rules import Rule
from quantforge.spec import QuantSpec, ScaleDtype

GROUP_SIZES = (128, 64, 32)
OFFERED_GROUP_SIZES = (256, 128, 96, 64, 48, 32, 16)


@dataclass(frozen=True)
class Grids:
    """The sites of a plan.

    Attributes:
        base: the recipe's own grid; the most common one when rules leave no site to it.
        specs: the grid of every site that is quantized, by its name, in the order of `sites`.
        left: the sites that stay in floating point, with the reason.
    """

    base: QuantSpec
    specs: dict[str, QuantSpec]
    sites: tuple[LinearSite, ...]
    left: tuple[tuple[LinearSite, str], ...]


class _Wanted(NamedTuple):
    """A grid before its group size is settled (-1: one scale per output channel)."""

    bits: int
    group_size: int | str
    symmetric: bool


def choose_grids(
    recipe: Recipe,
    layout: ModelLayout,
    scale_dtype: ScaleDtype,
    problems: list[str],
    notes: list[str],
    minima: Collection[str] = (),
) -> Grids:
    """Apply `ignore` and `rules`, choose or check the group size of each grid; what is wrong is added to `problems`.

    `minima` names the formats that store minima of asymmetric grids, which those then have exact (see `QuantSpec`).
    """
    ignored = _apply_ignore(layout, recipe.ignore, problems)
    ruled = _apply_rules([site for site in layout.sites if site.name not in ignored], recipe.rules, problems, notes)
    left: list[tuple[LinearSite, str]] = []
    wanted: dict[_Wanted, list[LinearSite]] = {_wanted(recipe, None): []}
    for site in layout.sites:
        rule = ruled.get(site.name)
        if site.name in ignored:
            left.append((site, "ignored by the recipe"))
        elif rule is not None and rule.skip:
            left.append((site, f"skipped by the rule {rule.match}"))
        else:
            wanted.setdefault(_wanted(recipe, rule), []).append(site)
    if recipe.activation_bits is not None:
        problems += _unfit_for_activations(recipe)
        if recipe.group_size == "auto" and any(wanted.values()):
            notes.append("group size -1: INT8 activations need one scale per output channel")
    several = sum(bool(sites) for sites in wanted.values()) > 1
    chosen: dict[_Wanted, QuantSpec] = {}
    by_site: dict[str, QuantSpec] = {}
    for want, sites in wanted.items():
        where = f"at {want.bits} bits, {'symmetric' if want.symmetric else 'asymmetric'}: " if several else ""
        group_size = _choose_group_size(want.group_size, sites, where, problems, notes) if sites else None
        exact_minima = bool(minima) and not want.symmetric
        chosen[want] = QuantSpec(want.bits, group_size, want.symmetric, scale_dtype, exact_minima)
        if exact_minima and sites:
            notes.append(
                f"{where}scales have {chosen[want].scale_digits} significant bits, so that the minima -zero * scale "
                f"which {', '.join(minima)} stores in float16 are exact"
            )
        by_site |= {site.name: chosen[want] for site in sites}
    kept = tuple(site for site in layout.sites if site.name in by_site)
    specs = {site.name: by_site[site.name] for site in kept}
    if not kept:
        problems.append(f"nothing to quantize: {len(layout.sites)} linear layers found, all of them ignored")
    problems += unequal_fused(kept, specs)
    own = next(iter(wanted))
    base = chosen[own] if wanted[own] or not specs else Counter(specs.values()).most_common(1)[0][0]
    return Grids(base, specs, kept, tuple(left))


def _wanted(recipe: Recipe, rule: Rule | None) -> _Wanted:
    """What the recipe asks of a site that `rule` decides about."""
    bits = recipe.bits if rule is None or rule.bits is None else rule.bits
    symmetric = recipe.symmetric if rule is None or rule.symmetric is None else rule.symmetric
    group_size = recipe.group_size if rule is None or rule.group_size is None else rule.group_size
    if recipe.activation_bits is not None and group_size == "auto":
        group_size = -1
    return _Wanted(bits, group_size, symmetric)


def _unfit_for_activations(recipe: Recipe) -> Iterator[str]:
    """INT8 kernels take one scale per row of symmetric 8-bit weights, and nothing else."""
    flag = f"--activation-bits {recipe.activation_bits}"
    for rule in (None, *(rule for rule in recipe.rules if not rule.skip)):
        want = _wanted(recipe, rule)
        own = "" if rule is None else f" (--rule {rule.label()})"
        if want.bits != 8 and (rule is None or rule.bits is not None):
            yield f"{flag} needs 8-bit weights: --bits 8, not {want.bits}{own}"
        if want.group_size != -1 and (rule is None or rule.group_size is not None):
            yield f"{flag} needs one scale per output channel: --group-size -1, not {want.group_size}{own}"
        if not want.symmetric and (rule is None or rule.symmetric is not None):
            yield f"{flag} needs symmetric weights: --sym, not --asym{own}"


# ------------------------------------------------------------------------------------------------ names


def matches(pattern: str, name: str, flag: str = "--ignore") -> bool:
    """True when a site name fits a pattern: a shell pattern, or a regular expression after ``re:``.

    `flag` is where the pattern comes from, for the UsageError about one that is no regular expression.
    """
    if pattern.startswith("re:"):
        try:
            return re.search(pattern[3:], name) is not None
        except re.error as error:
            raise UsageError(f"{flag} {pattern}: not a regular expression: {error}") from error
    return fnmatch.fnmatchcase(name, pattern)


def _apply_ignore(layout: ModelLayout, patterns: Iterable[str], problems: list[str]) -> set[str]:
    """Names of the linear layers to leave alone."""
    ignored: set[str] = set()
    everything = [site.name for site in layout.sites] + list(layout.kept_linears)
    for pattern in patterns:
        found = {name for name in everything if matches(pattern, name)}
        if not found:
            problems.append(
                f"--ignore {pattern} matches no linear layer; names look like {everything[0] if everything else '-'}"
            )
        ignored |= found
    return ignored


def _apply_rules(
    sites: Sequence[LinearSite], rules: Iterable[Rule], problems: list[str], notes: list[str]
) -> dict[str, Rule]:
    """The first rule that fits each site. One that fits none is a problem, one that always comes too late a warning."""
    ruled: dict[str, Rule] = {}
    for rule in rules:
        found = [site.name for site in sites if matches(rule.match, site.name, "--rule")]
        if not found and sites:
            problems.append(f"--rule {rule.label()} matches no site that is quantized; names look like {sites[0].name}")
        elif found and all(name in ruled for name in found):
            notes.append(
                f"warning: --rule {rule.label()} has no effect: earlier rules match all its {len(found)} sites"
            )
        ruled = dict.fromkeys(found, rule) | ruled
    return ruled


# ------------------------------------------------------------------------------------------------ group sizes


def _choose_group_size(
    asked: int | str, sites: list[LinearSite], where: str, problems: list[str], notes: list[str]
) -> int | None:
    """The group size of one grid's sites; None is one scale a row. One that is given is obeyed or refused.

    `where` says which grid it is about, in front of notes and problems; empty when there is one only.
    """
    widths = Counter(site.in_features for site in sites)
    if asked == "auto":
        fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
        if fitting:
            notes.append(f"{where}group size {fitting[0]}: {_why_chosen(fitting[0], widths)}")
            return fitting[0]
        problems.append(
            f"{where}no group size of {', '.join(map(str, GROUP_SIZES))} divides every site's input width "
            f"({', '.join(map(str, sorted(widths)))}). {_alternatives(widths)}"
        )
        return None
    size = int(asked)
    if size == -1:
        return None
    offending = [site for site in sites if site.in_features % size]
    if offending:
        lines = [f"  {line}" for line in _by_kind(offending)]
        problems.append(
            f"{where}group size {size} does not divide the input width of {len(offending)} sites. "
            + "\n".join([_alternatives(widths), *lines])
        )
    return size


def _by_kind(sites: list[LinearSite]) -> list[str]:
    """Sites with their input width, one line for all that differ in the layer only."""
    kinds: dict[tuple[str, int], list[int]] = {}
    for site in sites:
        kind = site.name.replace(f".{site.layer}.", ".*.", 1)
        kinds.setdefault((kind, site.in_features), []).append(site.layer)
    return [
        f"{kind} ({len(layers)} layers, {layers[0]} to {layers[-1]}): {width} inputs"
        for (kind, width), layers in kinds.items()
    ]


def _why_chosen(size: int, widths: Counter[int]) -> str:
    larger = [s for s in GROUP_SIZES if s > size]
    if not larger:
        return "it divides every site's input width"
    blockers = sorted(width for width in widths if width % larger[-1])
    return f"{larger[-1]} does not divide an input width of {', '.join(map(str, blockers[:3]))}"


def _alternatives(widths: Counter[int]) -> str:
    fitting = [size for size in OFFERED_GROUP_SIZES if all(width % size == 0 for width in widths)]
    offers = "".join(f" --group-size {size}," for size in fitting)
    return f"These fit all sites:{offers} or --group-size -1 (one scale per output channel)."


# ------------------------------------------------------------------------------------------------ fused matrices


def unequal_fused(sites: Sequence[LinearSite], specs: Mapping[str, QuantSpec]) -> list[str]:
    """Problems: sets of matrices that servers fuse whose members have different grids; every one of them is told."""
    problems = []
    for parts in FUSED.values():
        kinds: dict[str, list[int]] = defaultdict(list)
        for site in sites:
            parent, dot, leaf = site.name.rpartition(".")
            names = [f"{parent}{dot}{part}" for part in parts]
            present = {part: specs[name] for part, name in zip(parts, names, strict=True) if name in specs}
            if leaf == next(iter(present), None) and len(set(present.values())) > 1:
                grids = "; ".join(f"{part} {spec.label()}" for part, spec in present.items())
                kinds[f"{parent.replace(f'.{site.layer}.', '.*.', 1)}: {grids}"].append(site.layer)
        if kinds:
            lines = [f"  {kind} ({len(layers)} layers, {layers[0]} to {layers[-1]})" for kind, layers in kinds.items()]
            together = rf"re:\.({'|'.join(parts)})$"
            problems.append(
                f"vLLM and SGLang fuse {', '.join(parts)} and need one grid for all of them; give them one rule, such "
                f"as --rule '{together}=bits:8'\n" + "\n".join(lines)
            )
    return problems


def split_fused(sites: Iterable[LinearSite], ignored: Iterable[LinearSite]) -> Iterator[str]:
    """Servers fuse some matrices and refuse a set of which only a part is quantized."""
    left = {site.name for site in ignored}
    for site in sites:
        parent, _, leaf = site.name.rpartition(".")
        for parts in FUSED.values():
            split = [part for part in parts if f"{parent}.{part}" in left]
            if leaf in parts and split:
                yield (
                    f"warning: {parent}.{split[0]} is ignored and {site.name} is not; vLLM and SGLang fuse "
                    f"{', '.join(parts)} and refuse such a checkpoint: ignore all of them or none"
                )
                return
