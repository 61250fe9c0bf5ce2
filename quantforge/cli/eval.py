"""The ``eval`` verb."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from quantforge.errors import UsageError


def evaluate(
    checkpoint: Annotated[
        str,
        Argument(
            metavar="CHECKPOINT", help="Quantized or not; a directory, a hub id or a GGUF file.", show_default=False
        ),
    ],
    reference: Annotated[str | None, Option(help="The original: adds KL divergence and top-1 agreement.")] = None,
    text: Annotated[Path | None, Option(help="A text file to evaluate on.")] = None,
    dataset: Annotated[
        str | None, Option(help="Or a file with columns, a directory, a dataset id, or ID:subset:split.")
    ] = None,
    subset: Annotated[str | None, Option(help="Configuration of the dataset.")] = None,
    split: Annotated[str | None, Option(help="Split of the dataset. [test]")] = None,
    column: Annotated[str | None, Option(help="Column that holds the text. [text]")] = None,
    window: Annotated[int, Option(min=2, help="Tokens in a window.")] = 2048,
    windows: Annotated[int | None, Option(min=1, help="Windows, spread evenly over the text. [all]")] = None,
    bos: Annotated[Literal["auto", "always", "never"], Option(help="Start the text with BOS.")] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], Option()] = "auto",
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code from the checkpoint.")] = False,
    allow_pickle: Annotated[bool, Option("--allow-pickle", help="Read weights stored as pickles (.bin).")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Perplexity of a checkpoint and, against a reference, KL divergence and top-1 agreement.

    A quantized checkpoint is evaluated from its own packed tensors. Every number carries the name of its protocol.

    \b
    Examples:
      quantforge eval ./out --text wiki.test.raw
      quantforge eval ./out --reference ./SmolLM2-135M --text wiki.test.raw --windows 16
      quantforge eval ./out --reference org/model --dataset Salesforce/wikitext:wikitext-2-raw-v1:test
    """
    if (text is None) == (dataset is None):
        found = "both are given" if text is not None else "neither is given"
        raise UsageError(f"exactly one of --text FILE and --dataset ID is needed; {found}")
    if text is not None and not text.is_file():
        raise UsageError(f"--text {text}: no such file")

    from quantforge.cli.ui import Ui
    from quantforge.pipeline.score import evaluate_checkpoint

    ui = Ui(as_json=as_json, quiet=quiet)
    with ui.progress() as progress:
        result = evaluate_checkpoint(
            checkpoint,
            reference=reference,
            text=None if text is None else str(text),
            dataset=dataset,
            subset=subset,
            split=split,
            column=column,
            window=window,
            windows=windows,
            bos=bos,
            device=device,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            progress=progress,
        )
    ui.evaluation(result)
