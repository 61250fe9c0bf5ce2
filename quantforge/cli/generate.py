"""The ``generate`` verb."""

from typing import Annotated, Literal

from typer import Argument, Option


def generate(
    checkpoint: Annotated[str, Argument(metavar="CHECKPOINT", help="Quantized or not.", show_default=False)],
    prompt: Annotated[str, Argument(help="What the model is to continue or answer.", show_default=False)],
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens at most.")] = 256,
    temperature: Annotated[float, Option(min=0.0, help="0: the likeliest token each time.")] = 0.0,
    seed: Annotated[int, Option(help="Of the generator that tokens are drawn from.")] = 0,
    raw: Annotated[bool, Option("--raw", help="No chat template: continue the prompt as it is.")] = False,
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], Option(help="What is not packed.")] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], Option()] = "auto",
    int8_activations: Annotated[
        bool, Option("--int8-activations", help="Round inputs of 4-bit layers to 8 bits: faster on a CPU.")
    ] = False,
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code from the checkpoint.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print text and times as JSON, at the end.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Only the text.")] = False,
) -> None:
    """Text from a checkpoint, run on its packed weights, as it comes; then how fast it came.

    \b
    Examples:
      quantforge generate ./SmolLM2-135M-w4 "What is gravity?"
      quantforge generate ./SmolLM2-135M-w4 "Once upon a time" --raw --max-new-tokens 64 --temperature 0.8
    """
    from quantforge.cli.runtimeview import show_generated
    from quantforge.cli.ui import Ui
    from quantforge.model.tokenizer import load_tokenizer
    from quantforge.runtime.generate import generate as run
    from quantforge.runtime.load import load, runnable

    ui = Ui(as_json=as_json, quiet=quiet)
    path = runnable(checkpoint).path
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    model = load(
        path,
        dtype=dtype,
        device=device,
        activations="int8-group" if int8_activations else "float",
        trust_remote_code=trust_remote_code,
    )

    def write(text: str) -> None:
        ui.out.file.write(text)
        ui.out.file.flush()

    generated = run(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        chat=not raw,
        write=(lambda text: None) if as_json else write,
    )
    show_generated(ui, generated)
