"""The ``verify`` verb."""

from typing import Annotated

from typer import Argument, Exit, Option


def verify(
    checkpoint: Annotated[
        str, Argument(metavar="CHECKPOINT", help="Local directory, or a GGUF file.", show_default=False)
    ],
    reference: Annotated[
        str | None, Option("--reference", metavar="MODEL", help="The float model it was made from.", show_default=False)
    ] = None,
    fix: Annotated[
        str | None,
        Option("--fix", metavar="OUT", help="Write a repaired copy into this directory.", show_default=False),
    ] = None,
    tensor_parallel: Annotated[int, Option("--tp", min=1, help="Devices over which servers split it.")] = 1,
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code from the checkpoint.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print every finding as JSON.")] = False,
) -> None:
    """Read everything in a checkpoint, ours or another tool's, and tell all that is wrong with it.

    Exits with 1 when there are errors; warnings alone are no failure. With --reference, tensors that were kept must be
    the original's, and quantized ones close to it.

    \b
    Examples:
      quantforge verify ./out
      quantforge verify ./out --reference ./SmolLM2-135M-Instruct
      quantforge verify ./out --fix ./repaired
    """
    from quantforge.cli.ui import Ui
    from quantforge.pipeline.examine import examine

    ui = Ui(as_json=as_json)
    found = examine(checkpoint, reference, tensor_parallel=tensor_parallel, trust_remote_code=trust_remote_code)
    if fix is None:
        ui.examination(found)
    else:
        from quantforge.pipeline.repair import repair

        repaired = repair(found, fix, reference, trust_remote_code=trust_remote_code)
        ui.examination(found, repaired)
        found = repaired.after
    if not found.ok:
        raise Exit(1)
