"""The ``inspect`` verb."""

from typing import Annotated

from typer import Argument, Option


def inspect(
    checkpoint: Annotated[
        str, Argument(metavar="CHECKPOINT", help="Local directory, or a GGUF file.", show_default=False)
    ],
    allow_pickle: Annotated[bool, Option("--allow-pickle", help="Read weights stored as pickles (.bin).")] = False,
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code from the checkpoint.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print everything, site by site, as JSON.")] = False,
) -> None:
    """What a checkpoint holds: scheme, format, sizes, bits per weight, and what was left alone and why.

    \b
    Examples:
      quantforge inspect ./out
      quantforge inspect ./out --json
    """
    from quantforge.cli.ui import Ui
    from quantforge.pipeline.describe import describe_checkpoint

    Ui(as_json=as_json).description(describe_checkpoint(checkpoint, allow_pickle, trust_remote_code))
