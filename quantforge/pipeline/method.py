"""What ``--method awq+gptq`` means: transforms, then a solver, and the options that come with them."""

from dataclasses import dataclass

from quantforge.errors import UsageError
from quantforge.methods import Method, OptionValue, load_method, method_names
from quantforge.recipe import Recipe
from quantforge.transforms import Transform, load_transform, transform_names


@dataclass(frozen=True)
class Chosen:
    """Transforms in the order they are applied, the solver, and its options with defaults filled in."""

    transforms: tuple[Transform, ...]
    solver: Method
    options: dict[str, OptionValue]

    @property
    def label(self) -> str:
        """``awq+gptq``."""
        return "+".join([*(transform.name for transform in self.transforms), self.solver.name])


def choose_method(recipe: Recipe) -> Chosen:
    """Read `method` and `transforms` of a recipe; raises UsageError for unknown names, wrong orders and options.

    A method is a solver's name, transforms and a solver joined by ``+``, or transforms alone: then the last one says
    which solver goes with it, and with which options unless they are given.
    """
    parts = [part.strip() for part in recipe.method.split("+")]
    transforms, solvers = transform_names(), method_names()
    unknown = [part for part in (*recipe.transforms, *parts) if part not in transforms and part not in solvers]
    if unknown:
        raise UsageError(
            f"--method {recipe.method}: unknown method {unknown[0]!r}; known methods: {', '.join(solvers)}; transforms "
            f"that can go before one, joined by +: {', '.join(transforms)}"
        )
    *first, last = parts
    names = [*recipe.transforms, *first, *([last] if last in transforms else [])]
    if misplaced := [name for name in names if name in solvers]:
        raise UsageError(
            f"--method {recipe.method}: {misplaced[0]} chooses the codes and can only be the last, after transforms "
            f"({', '.join(transforms)})"
        )
    if len(set(names)) != len(names):
        raise UsageError(f"--method {recipe.method}: a transform is given twice: {', '.join(names)}")
    chosen = tuple(load_transform(name) for name in names)
    if last in transforms:
        solver = load_method(chosen[-1].solver)
        return Chosen(chosen, solver, solver.resolve(dict(chosen[-1].solver_options) | recipe.options))
    solver = load_method(last)
    return Chosen(chosen, solver, solver.resolve(recipe.options))


def refuse_floating_inputs(chosen: Chosen, activation_bits: int | None) -> None:
    """Raises UsageError for a transform that is about quantized activations where they stay in floating point."""
    pointless = [transform.name for transform in chosen.transforms if transform.quantizes_inputs]
    if pointless and activation_bits is None:
        raise UsageError(
            f"{pointless[0]} makes activations easier to round, and here they stay in floating point; quantize them "
            "too (8 bits), or leave it out (awq is the transform for weights alone)"
        )
