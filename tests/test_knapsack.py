"""Choosing bits for units: limits hold, nothing beats it uniformly, and small cases are solved to the optimum."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from quantforge.numerics.knapsack import Option, bounds, choose_bits

BITS = (2, 3, 4, 8)
Units = dict[str, dict[int, Option]]


@st.composite
def instances(draw: st.DrawFn, most: int = 5) -> tuple[Units, float]:
    """Units of various sizes whose loss falls with the bits, roughly fourfold a bit, and a limit that can be met."""
    units: Units = {}
    for number in range(draw(st.integers(1, most))):
        weights = draw(st.integers(1, 40))
        scale = draw(st.floats(1e-3, 10))
        noise = [draw(st.floats(0.5, 2)) for _ in BITS]
        units[f"unit{number}"] = {
            bits: Option(bits * weights, scale * factor * 4.0**-bits) for bits, factor in zip(BITS, noise, strict=True)
        }
    least, most_cost = bounds(units)
    return units, least + draw(st.floats(0, 1)) * (most_cost - least)


def total(units: Units, bits: dict[str, int]) -> tuple[float, float]:
    options = [units[name][bits[name]] for name in units]
    return sum(option.cost for option in options), math.fsum(option.loss for option in options)


def every_choice(units: Units) -> list[dict[str, int]]:
    return [dict(zip(units, bits, strict=True)) for bits in itertools.product(BITS, repeat=len(units))]


@given(instances(most=40))
def test_the_limit_holds_and_no_uniform_choice_within_it_is_better(instance: tuple[Units, float]) -> None:
    units, limit = instance
    chosen = choose_bits(units, limit)
    assert chosen is not None and chosen.keys() == units.keys()
    cost, loss = total(units, chosen)
    assert cost <= limit * (1 + 1e-8)
    for bits in BITS:
        uniform_cost, uniform_loss = total(units, dict.fromkeys(units, bits))
        assert uniform_cost > limit or loss <= uniform_loss * (1 + 1e-9)


@given(instances(most=5))
def test_the_loss_is_that_of_the_best_choice_up_to_one_step_of_a_hull(instance: tuple[Units, float]) -> None:
    units, limit = instance
    chosen = choose_bits(units, limit)
    assert chosen is not None
    best = min(loss for cost, loss in (total(units, bits) for bits in every_choice(units)) if cost <= limit)
    largest_step = max(max(o.loss for o in options.values()) - min(o.loss for o in options.values())
                       for options in units.values())  # fmt: skip
    assert total(units, chosen)[1] <= best + largest_step * (1 + 1e-9)


def test_small_cases_are_nearly_always_solved_to_the_optimum() -> None:
    """Over 200 drawn instances of 5 units the mean loss over the optimum's stays below 2%."""
    import random

    draw = random.Random(3)
    excess = []
    for _ in range(200):
        units = {
            f"unit{number}": {
                bits: Option(bits * weights, scale * draw.uniform(0.7, 1.4) * 4.0**-bits) for bits in BITS
            }
            for number in range(5)
            for weights, scale in [(draw.randint(1, 40), draw.lognormvariate(0, 1.5))]
        }
        least, most = bounds(units)
        limit = least + draw.random() * (most - least)
        chosen = choose_bits(units, limit)
        assert chosen is not None
        best = min(loss for cost, loss in (total(units, bits) for bits in every_choice(units)) if cost <= limit)
        excess.append(total(units, chosen)[1] / best - 1)
    assert min(excess) >= -1e-9 and sum(excess) / len(excess) < 0.02


def test_bits_go_where_they_save_the_most() -> None:
    units = {
        "robust": {3: Option(300, 0.002), 4: Option(400, 0.001)},
        "fragile": {3: Option(300, 0.2), 4: Option(400, 0.05)},
    }
    assert choose_bits(units, 700) == {"robust": 3, "fragile": 4}
    assert choose_bits(units, 800) == {"robust": 4, "fragile": 4}
    assert choose_bits(units, 699) == {"robust": 3, "fragile": 3}
    assert choose_bits(units, 599) is None
    assert bounds(units) == (600, 800)


def test_an_option_that_costs_more_and_loses_more_is_never_taken() -> None:
    units = {"odd": {3: Option(300, 0.1), 4: Option(400, 0.2), 8: Option(800, 0.01)}}
    assert choose_bits(units, 700) == {"odd": 3}
    assert choose_bits(units, 800) == {"odd": 8}


def test_costs_and_losses_may_change_places() -> None:
    """The smallest size whose loss stays below a limit is the same problem."""
    units = {
        "a": {3: Option(0.10, 300), 4: Option(0.02, 400), 8: Option(0.0, 800)},
        "b": {3: Option(0.30, 300), 4: Option(0.08, 400), 8: Option(0.0, 800)},
    }
    assert choose_bits(units, 0.19) == {"a": 3, "b": 4}
    assert choose_bits(units, 0.05) == {"a": 4, "b": 8}
    assert choose_bits(units, 0.0) == {"a": 8, "b": 8}
