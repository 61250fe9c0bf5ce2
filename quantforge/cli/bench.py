"""The ``bench`` verb."""

from typing import Annotated, Literal

from typer import Argument, Option


def bench(
    checkpoint: Annotated[str, Argument(metavar="CHECKPOINT", help="Quantized.", show_default=False)],
    prompt_tokens: Annotated[int, Option(min=1, help="Tokens of a prefill.")] = 128,
    new_tokens: Annotated[int, Option(min=2, help="Tokens decoded after it.")] = 16,
    repeats: Annotated[int, Option(min=1, help="Of everything; the least time counts.")] = 3,
    threads: Annotated[int | None, Option(min=1, help="Of the CPU. [torch's own number]")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], Option()] = "auto",
    dense: Annotated[bool, Option(help="Compare with dense models, float32 and bfloat16.")] = True,
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code from the checkpoint.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Prefill and decode speed of a checkpoint on this machine, and of each shape of layer, against dense ones.

    Batch 1. Dense models have the same shapes and random weights.

    \b
    Examples:
      quantforge bench ./SmolLM2-135M-w4
      quantforge bench ./Llama-8B-w4 --no-dense --prompt-tokens 512 --json
    """
    import torch

    from quantforge.cli.runtimeview import show_benchmark
    from quantforge.cli.ui import Ui
    from quantforge.runtime.bench import benchmark

    if threads is not None:
        torch.set_num_threads(threads)
    ui = Ui(as_json=as_json, quiet=quiet)
    with ui.progress() as progress:
        result = benchmark(
            checkpoint,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            device=device,
            dense=dense,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    show_benchmark(ui, result)
