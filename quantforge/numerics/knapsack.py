"""Which unit gets how many bits: one of a few options for each of many units, under one limit.

Every option has a cost (what is limited) and a loss (what should be small). One is chosen for each unit, so that the
costs stay within the limit and the losses add up to little.

This is the multiple-choice knapsack. On the lower convex hull of each unit's options, steps taken in the order of loss
saved for cost added are optimal but for the last step that does not fit (Sinha and Zoltners, 1979); what is left of the
limit is used up by single changes and by exchanges between two units, until none helps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

SLACK = 1e-9
"""Relative rounding allowed when sums of costs are compared with the limit."""


@dataclass(frozen=True)
class Option:
    """One way to store a unit."""

    cost: float
    loss: float


Options = Mapping[int, Option]
"""What a unit may become, by bits."""


def bounds(units: Mapping[str, Options]) -> tuple[float, float]:
    """The smallest and the largest total cost that can be chosen."""
    least = sum(min(option.cost for option in options.values()) for options in units.values())
    return least, sum(max(option.cost for option in options.values()) for options in units.values())


def choose_bits(units: Mapping[str, Options], limit: float) -> dict[str, int] | None:
    """Bits for every unit with total cost at most `limit` and a small total loss; None when nothing costs so little.

    The loss is at most that of the best choice plus that of the largest step between two neighbours on a hull, and at
    most that of the same bits everywhere, where all units offer them and the limit allows them. Deterministic: ties go
    to the unit and the bits that come first.
    """
    limit += SLACK * abs(limit)
    hulls = {name: _hull(options) for name, options in units.items()}
    best = {name: hull[0] for name, hull in hulls.items()}
    if _total(units, best).cost > limit:
        return None
    spent = _total(units, best).cost
    steps = [
        (_slope(units[name][low], units[name][high]), number, place, name, high)
        for number, (name, hull) in enumerate(hulls.items())
        for place, (low, high) in enumerate(pairwise(hull))
    ]
    stopped: set[str] = set()
    for _, _, _, name, high in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        added = units[name][high].cost - units[name][best[name]].cost
        if name in stopped or spent + added > limit:
            stopped.add(name)  # a hull is climbed step by step
            continue
        best[name], spent = high, spent + added
    for bits in sorted({bits for options in units.values() for bits in options}):
        if all(bits in options for options in units.values()):
            uniform = dict.fromkeys(units, bits)
            total = _total(units, uniform)
            if total.cost <= limit and total.loss < _total(units, best).loss:
                best = uniform
    return _polish(units, best, limit)


def _hull(options: Options) -> list[int]:
    """Bits on the lower convex hull, cost rising and loss falling; the cheapest is always on it."""
    hull: list[int] = []
    for bits in sorted(options, key=lambda bits: (options[bits].cost, options[bits].loss)):
        if hull and options[bits].loss >= options[hull[-1]].loss:
            continue
        while len(hull) > 1 and _slope(options[hull[-2]], options[hull[-1]]) <= _slope(
            options[hull[-1]], options[bits]
        ):
            hull.pop()
        hull.append(bits)
    return hull


def _slope(low: Option, high: Option) -> float:
    """Loss saved for each unit of cost added."""
    return (low.loss - high.loss) / (high.cost - low.cost) if high.cost > low.cost else math.inf


def _total(units: Mapping[str, Options], bits: Mapping[str, int]) -> Option:
    chosen = [units[name][bits[name]] for name in units]
    return Option(sum(option.cost for option in chosen), math.fsum(option.loss for option in chosen))


def _polish(units: Mapping[str, Options], bits: dict[str, int], limit: float) -> dict[str, int]:
    """Take the single change or the exchange between two units that saves the most loss, until none is left."""
    bits = dict(bits)
    while True:
        spare = limit - _total(units, bits).cost
        moves = [
            (option.cost - units[name][bits[name]].cost, units[name][bits[name]].loss - option.loss, name, other)
            for name, options in units.items()
            for other, option in options.items()
            if other != bits[name]
        ]  # (cost added, loss saved, unit, its new bits)
        best, best_saved = [], SLACK * max(_total(units, bits).loss, 0)
        savers = [move for move in moves if move[1] > 0]
        payers = sorted((move for move in moves if move[0] < 0), key=lambda move: -move[1])
        for added, saved, name, other in savers:
            if saved <= best_saved:
                continue
            if added <= spare:
                best, best_saved = [(name, other)], saved
            for freed, lost, payer, lower in payers:  # from the one that loses least
                if saved + lost <= best_saved:
                    break
                if payer != name and added + freed <= spare:
                    best, best_saved = [(name, other), (payer, lower)], saved + lost
                    break
        if not best:
            return bits
        bits |= dict(best)
