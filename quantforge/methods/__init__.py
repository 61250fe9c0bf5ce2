"""Solvers. One file a method; the file's ``METHOD`` is the registry entry.

To add a method, write ``methods/<name>.py`` with a module constant ``METHOD: Method`` and a test. Nothing else changes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from quantforge.errors import UsageError
from quantforge.quantized import QuantizedWeight
from quantforge.registry import load, names_in
from quantforge.spec import QuantSpec

OptionValue = bool | int | float | str


@dataclass(frozen=True, eq=False)
class WeightProblem:
    """One matrix to be put on a grid.

    Attributes:
        name: the site, or the sites stacked along rows, for messages.
        weight: [out, in], float32 or float64; the solver computes in this dtype and does not change it.
        spec: the grid.
        gram: mean outer product of the inputs, [in, in], same dtype; None when the method needs none.
        tokens: input rows that went into `gram`.
        options: the method's options, defaults filled in.
    """

    name: str
    weight: torch.Tensor
    spec: QuantSpec
    gram: torch.Tensor | None
    tokens: int
    options: Mapping[str, OptionValue]


@dataclass(frozen=True, eq=False)
class Solution:
    """Codes on a grid, and what the solver had to do to get there (see `report.SiteReport` for the meanings)."""

    quantized: QuantizedWeight
    damping: float | None = None
    damping_steps: int = 0
    dead_inputs: int = 0
    fallback: str | None = None


@dataclass(frozen=True)
class Option:
    """A method's option: its default, its admissible range or values, and one line of help."""

    default: OptionValue
    help: str
    choices: tuple[OptionValue, ...] = ()
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True)
class Method:
    """A way to choose codes. `solve` is pure: same problem, same solution, no global random state.

    `needs_gram` says whether it always needs statistics; option values in `needs_gram_with` ask for them too.
    """

    name: str
    summary: str
    needs_gram: bool
    solve: Callable[[WeightProblem], Solution]
    options: Mapping[str, Option] = field(default_factory=dict)
    needs_gram_with: Mapping[str, OptionValue] = field(default_factory=dict)

    def wants_gram(self, options: Mapping[str, OptionValue]) -> bool:
        """Whether statistics are needed with these options, defaults filled in."""
        return self.needs_gram or any(options.get(key) == value for key, value in self.needs_gram_with.items())

    def resolve(self, given: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """Fill in defaults; raises UsageError on an unknown option or a value out of range."""
        for key, value in given.items():
            option = self.options.get(key)
            if option is None:
                known = ", ".join(self.options) or "none"
                raise UsageError(f"method {self.name} has no option {key!r}; its options are: {known}")
            if type(value) is not type(option.default) and not (
                isinstance(option.default, float) and isinstance(value, int) and not isinstance(value, bool)
            ):
                raise UsageError(f"{self.name}.{key} must be of type {type(option.default).__name__}; got {value!r}")
            if option.choices and value not in option.choices:
                raise UsageError(f"{self.name}.{key} must be one of {', '.join(map(str, option.choices))}; got {value}")
            number = float(value) if isinstance(value, int | float) else 0.0
            low = -math.inf if option.minimum is None else option.minimum
            high = math.inf if option.maximum is None else option.maximum
            if not low <= number <= high:  # also refuses NaN
                raise UsageError(f"{self.name}.{key} must lie in [{low:g}, {high:g}]; got {value}")
        return {key: given.get(key, option.default) for key, option in self.options.items()}


def method_names() -> list[str]:
    """Names of all methods, from the files of this folder."""
    return names_in(__path__)


def load_method(name: str) -> Method:
    """Import one method by name; raises UsageError naming the known ones."""
    return load(__name__, __path__, name, "METHOD", Method, UsageError)
