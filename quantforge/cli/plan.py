"""The ``plan`` verb: the flags of ``quantize``, and how the result will be served."""

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import typer
from typer import Option

from quantforge.cli.quantize import quantize, resolve
from quantforge.errors import UsageError

SERVING = "Serving"
_OF_A_RUN = {"dry_run", "strict", "quiet"}


def _serving(
    tensor_parallel: Annotated[
        int, Option("--tp", min=1, help="Devices that share each layer.", rich_help_panel=SERVING)
    ] = 1,
    context_length: Annotated[
        int, Option("--context", min=1, help="Tokens in a sequence.", rich_help_panel=SERVING)
    ] = 8192,
    batch: Annotated[int, Option(min=1, help="Sequences at a time.", rich_help_panel=SERVING)] = 8,
    kv_bits: Annotated[
        Literal["16", "8", "4"] | None,
        Option(help="Of a number in the cache. [16, or 8 with --kv-cache]", rich_help_panel=SERVING),
    ] = None,
) -> None:
    """The flags that `plan` adds."""


def plan(context: typer.Context, **flags: Any) -> None:
    """What quantizing a model would give, without reading its weights: sizes, memory, time, and which servers take it.

    MODEL may also be a config.json, or a directory with nothing else: shapes then come from the config. Takes the
    flags of quantize.

    \b
    Examples:
      quantforge plan ./SmolLM2-135M
      quantforge plan org/model --bits 4 --group-size 128 --format gptq --tp 2 --context 32768
      quantforge plan ./Llama-70B/config.json --avg-bits 3.5 --kv-bits 8 --json
    """
    with _uncollected():
        _plan(context, **flags)


def _plan(context: typer.Context, **flags: Any) -> None:
    from quantforge.cli.ui import Ui
    from quantforge.pipeline.outlook import Load, look_ahead

    ui = Ui(as_json=flags["as_json"])
    variants = resolve(context)
    if len(variants) > 1:
        raise UsageError("plan looks at one variant at a time; give one of --bits and one of --method")
    kv_bits = None if flags["kv_bits"] is None else int(flags["kv_bits"])
    load = Load(flags["context_length"], flags["batch"], kv_bits, flags["tensor_parallel"])
    recipe, outlook = look_ahead(variants[0].recipe, load)
    ui.outlook(recipe, variants[0].notes, outlook)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No cyclic garbage is collected while this is open.

    Nearly all of this verb's time goes into importing torch and the model's code, and every few modules set off a
    collection of everything imported before: a seventh of the time, for a few megabytes.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _signature() -> inspect.Signature:
    """That of `quantize` without what only a run needs, and with what serving needs, for typer to read."""
    own = [p for name, p in inspect.signature(quantize).parameters.items() if name not in _OF_A_RUN]
    return inspect.Signature([*own, *inspect.signature(_serving).parameters.values()])


plan.__signature__ = _signature()  # type: ignore[attr-defined]
plan.__annotations__ = {name: parameter.annotation for name, parameter in _signature().parameters.items()}
