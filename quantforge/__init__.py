"""Post-training quantization of language models, with exports that are checked before they leave.

The same words as on the command line::

    from quantforge import Recipe, evaluate_checkpoint, make_plan, quantize

    recipe = Recipe(model="./SmolLM2-135M-Instruct", bits=4, group_size=64, output="./out")
    for event in quantize(recipe, make_plan(recipe)):
        print(event)
    print(evaluate_checkpoint("./out", reference=recipe.model, text="wiki.test.raw", windows=16).ppl)

Names are imported when first used: ``import quantforge`` alone pulls in no torch. See ``docs/architecture.md``.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantforge.errors import QuantforgeError
    from quantforge.pipeline.convert import convert_checkpoint
    from quantforge.pipeline.describe import describe_checkpoint
    from quantforge.pipeline.many import plan_many, quantize_many
    from quantforge.pipeline.outlook import Load, look_ahead
    from quantforge.pipeline.plan import make_plan
    from quantforge.pipeline.run import quantize
    from quantforge.pipeline.score import evaluate_checkpoint
    from quantforge.reading import load_recipe
    from quantforge.recipe import Recipe
    from quantforge.rules import Rule
    from quantforge.runtime.load import load

try:
    __version__ = version("quantforge-llm")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0.0.0+source"

__all__ = [
    "Load",
    "QuantforgeError",
    "Recipe",
    "Rule",
    "__version__",
    "convert_checkpoint",
    "describe_checkpoint",
    "evaluate_checkpoint",
    "load",
    "load_recipe",
    "look_ahead",
    "make_plan",
    "plan_many",
    "quantize",
    "quantize_many",
]

_HOMES = {
    "Load": "pipeline.outlook",
    "QuantforgeError": "errors",
    "Recipe": "recipe",
    "Rule": "rules",
    "convert_checkpoint": "pipeline.convert",
    "describe_checkpoint": "pipeline.describe",
    "evaluate_checkpoint": "pipeline.score",
    "load": "runtime.load",
    "load_recipe": "reading",
    "look_ahead": "pipeline.outlook",
    "make_plan": "pipeline.plan",
    "plan_many": "pipeline.many",
    "quantize": "pipeline.run",
    "quantize_many": "pipeline.many",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
