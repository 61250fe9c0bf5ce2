"""Regular expressions that a config holds, matched in bounded time, since anyone may have written them.

Python's engine tries one path through an expression after another, and there can be more of them than can be tried. One
with few enough is left to it. Otherwise all paths are followed at once (Thompson, 1968, CACM 11(6)): a set of places in
the name goes through the parsed expression, one bit a place, so that nothing is tried twice. That decides the same for
everything but references to groups, looking back, and atomic groups; those are refused, and so is what takes too long.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from quantforge.errors import SourceError

MOST_EFFORT = 20_000_000
"""Paths times length of the name, up to which `re` answers at once."""

MOST_STEPS = 10_000
LONGEST_NAME = 1000
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
Node = tuple[Any, Any]


class _Beyond(Exception):
    """No answer in bounded time; never leaves this module."""


def fits(expression: str, name: str, key: str, *, whole: bool = False) -> bool:
    """Whether an expression matches the beginning of a name, or the `whole` of it.

    SourceError, with `key` of the config that holds it, for what is no expression or cannot be answered.
    """
    try:
        if paths(expression, len(name)) * (len(name) + 1) <= MOST_EFFORT:
            return (re.fullmatch if whole else re.match)(expression, name) is not None
        return walked(expression, name, whole)
    except _Beyond as error:
        raise SourceError(
            f"quantization_config: {key} holds {expression[:200]!r}, which cannot be matched in bounded time ({error})"
        ) from error
    except (re.error, OverflowError, RecursionError) as error:
        raise SourceError(
            f"quantization_config: {key} holds {expression[:200]!r}, not a regular expression: {error}"
        ) from error


@lru_cache(maxsize=1024)
def _parsed(expression: str) -> Any:
    re.compile(expression)  # finds what the parser alone does not
    return _parser.parse(expression)


@lru_cache(maxsize=4096)
def paths(expression: str, length: int) -> int:
    """No fewer than the ways in which `re` may go through an expression, up to MOST_EFFORT + 1."""
    return _paths(_parsed(expression), length)


def _paths(nodes: Sequence[Node], length: int) -> int:
    """The product over a sequence."""
    found = 1
    for kind, value in nodes:
        if kind in REPEATS:
            least, most, inner = value
            found *= _paths_of_repeat(least, most, inner, length)
        elif kind is _constants.BRANCH:
            found *= sum(_paths(part, length) for part in value[1])
        elif kind is _constants.SUBPATTERN:
            found *= _paths(value[3], length)
        elif kind in (_constants.ASSERT, _constants.ASSERT_NOT):
            found *= _paths(value[1], length)
        elif kind is _constants.ATOMIC_GROUP:
            found *= _paths(value, length)
        elif kind is _constants.GROUPREF_EXISTS:
            found *= _paths(value[1], length) + _paths(value[2] or (), length)
        found = min(found, MOST_EFFORT + 1)
    return found


def _paths_of_repeat(least: int, most: int, nodes: Sequence[Node], length: int) -> int:
    if least > length:
        return MOST_EFFORT + 1  # rounds that take up no character can be any number
    inner, rounds = _paths(nodes, length), min(most, length)
    return rounds - least + 1 if inner == 1 else (rounds + 1) * inner ** min(rounds, MOST_EFFORT.bit_length())


def walked(expression: str, name: str, whole: bool) -> bool:
    """What `fits` answers, by following all paths at once."""
    if len(name) > LONGEST_NAME:
        raise _Beyond(f"a name of {len(name)} characters")
    tree = _parsed(expression)
    ends = _Walk(name, tree.state).through(tree, 1, 0)
    return bool(ends >> len(name) if whole else ends)


class _Walk:
    """Sets of places in a name, bit i for the place before character i, on their way through an expression."""

    def __init__(self, name: str, state: Any) -> None:
        self.name, self.state = name, state
        self.steps = 0
        self.fitting: dict[tuple[int, int], int] = {}

    def through(self, nodes: Sequence[Node], places: int, flags: int) -> int:
        """Where one is after `nodes`, from any of `places`."""
        for node in nodes:
            if not places:
                return 0
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise _Beyond(f"{MOST_STEPS} steps do not suffice for a name of {len(self.name)} characters")
            places = self._after(node, places, flags)
        return places

    def _after(self, node: Node, places: int, flags: int) -> int:
        kind, value = node
        if kind is _constants.BRANCH:
            ends = 0
            for part in value[1]:
                ends |= self.through(part, places, flags)
            return ends
        if kind is _constants.SUBPATTERN and not value[2]:
            return self.through(value[3], places, flags | value[1])
        if kind in REPEATS[:2]:
            least, most, inner = value
            return self._repeated(least, most, inner, places, flags)
        if kind in (_constants.ASSERT, _constants.ASSERT_NOT) and value[0] > 0:
            wanted = kind is _constants.ASSERT
            each = (1 << place for place in range(len(self.name) + 1) if places >> place & 1)
            return sum(place for place in each if bool(self.through(value[1], place, flags)) is wanted)
        if kind is _constants.AT:
            return places & self._fitting(node, flags)
        if kind in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN):
            return (places & self._fitting(node, flags)) << 1
        raise _Beyond(f"it has a part of the kind {str(kind).lower()}")

    def _repeated(self, least: int, most: int, nodes: Sequence[Node], places: int, flags: int) -> int:
        for _ in range(least):
            after = self.through(nodes, places, flags)
            if after == places:
                break  # and so it stays; no later than after one round for each place
            places = after
        reached = newest = places
        rounds = least
        while newest and rounds < most:
            after = self.through(nodes, newest, flags)
            newest, reached, rounds = after & ~reached, reached | after, rounds + 1
        return reached

    def _fitting(self, node: Node, flags: int) -> int:
        """The places where `re` matches one node that takes up one character or none."""
        key = (id(node), flags)
        if key not in self.fitting:
            alone = _compiler.compile(_parser.SubPattern(self.state, [node]), flags)
            self.fitting[key] = sum(1 << i for i in range(len(self.name) + 1) if alone.match(self.name, i) is not None)
        return self.fitting[key]
