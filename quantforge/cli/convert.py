"""The ``convert`` verb."""

from typing import Annotated

from typer import Argument, Option

from quantforge.cli.flags import listed


def convert(
    checkpoint: Annotated[
        str, Argument(metavar="CHECKPOINT", help="Quantized checkpoint, or a GGUF file.", show_default=False)
    ],
    format: Annotated[
        str, Option("--format", help="compressed-tensors, gptq, gptq-v2, awq or gguf.", show_default=False)
    ],
    output: Annotated[str | None, Option("--output", "-o", help="Directory. [CHECKPOINT-FORMAT]")] = None,
    config: Annotated[
        str | None, Option(help="Directory of config.json and tokenizer, for a GGUF file without.", show_default=False)
    ] = None,
    max_shard_size: Annotated[str, Option(help="Largest file, such as 500MB.")] = "5GB",
    bundle_kernels: Annotated[
        str, Option(metavar="TARGETS", help="Compile kernels for these GPUs: sm_80,sm_90,gfx942.")
    ] = "",
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code from the checkpoint.")] = False,
    allow_pickle: Annotated[bool, Option("--allow-pickle", help="Read weights stored as pickles (.bin).")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Write a quantized checkpoint in another format with exactly the same weights, or say why that cannot be.

    Reads what GPTQModel, AutoAWQ, AutoRound, llm-compressor and quantforge write. Codes, scales and zeros are carried
    over as they are, and read back before the output gets its name.

    \b
    Examples:
      quantforge convert ./model-gptq --format awq
      quantforge convert ./model-awq --format compressed-tensors -o ./model-ct --json
      quantforge convert ./model.Q8_0.gguf --config ./model --format gptq
    """
    from quantforge.cli.ui import Ui
    from quantforge.pipeline.convert import convert_checkpoint

    ui = Ui(as_json=as_json, quiet=quiet)
    with ui.progress() as progress:
        conversion = convert_checkpoint(
            checkpoint,
            format,
            output,
            config=config,
            max_shard_size=max_shard_size,
            targets=listed(bundle_kernels),
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            progress=progress,
        )
    ui.conversion(conversion)
