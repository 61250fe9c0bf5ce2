"""Comma lists of bits and methods: one set of flags becomes several, one for each variant asked for."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import typer

from quantforge.errors import UsageError


def _bits(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"--bits takes 2, 3, 4 or 8, or several, such as 4,3; got {text!r}") from None


AXES: dict[str, Callable[[str], Any]] = {"bits": _bits, "method": str}
"""Flags that may hold several values, and how one of them is read."""


def expand(overrides: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The product of the values of all axes, bits varying slowest; a single element when each has one value.

    Raises UsageError for a value that is given twice or is empty.
    """
    axes = {name: _values(name, overrides[name], read) for name, read in AXES.items() if name in overrides}
    return [{**overrides, **dict(zip(axes, values, strict=True))} for values in product(*axes.values())]


def _values(name: str, text: str, read: Callable[[str], Any]) -> list[Any]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and not all(parts):
        raise UsageError(f"--{name} {text}: a value is missing between commas")
    values = [read(part) for part in parts]
    if repeated := [value for place, value in enumerate(values) if value in values[:place]]:
        raise UsageError(f"--{name} {text}: {repeated[0]} is given twice")
    return values
