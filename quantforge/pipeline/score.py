"""Perplexity and divergence of a checkpoint, streamed layer by layer from its own files."""

from collections.abc import Callable
from pathlib import Path

from quantforge.errors import UsageError
from quantforge.evaluate.divergence import EvalResult, evaluate_windows
from quantforge.evaluate.protocol import Windows, build_windows, load_dataset_rows, load_rows, parse_dataset
from quantforge.model.packed import open_any
from quantforge.model.streamed import StreamedModel, StreamedPass
from quantforge.model.tokenizer import load_tokenizer
from quantforge.pipeline.plan import choose_device

Progress = Callable[[str, int, int], None]


def evaluate_checkpoint(
    checkpoint: str,
    *,
    reference: str | None = None,
    text: str | None = None,
    dataset: str | None = None,
    column: str | None = None,
    window: int = 2048,
    windows: int | None = None,
    bos: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> EvalResult:
    """Score a float or quantized checkpoint by the classic protocol, and against `reference` when there is one.

    Quantized checkpoints are dequantized from their packed tensors. The tokenizer is the reference's when there is one,
    so that both models see the same tokens. Peak memory is one decoder layer, the outer weights, and the hidden states
    of all windows.

    Args:
        text: a ``.txt`` or ``.raw`` file; exactly one of `text` and `dataset` is needed.
        progress: called with (what, done, total).
    """
    if (text is None) == (dataset is None):
        raise UsageError("give exactly one of --text FILE and --dataset ID")
    tokenizer_source = open_any(reference if reference is not None else checkpoint, allow_pickle=allow_pickle)
    tokenizer = load_tokenizer(tokenizer_source.path, trust_remote_code=trust_remote_code)
    if text is not None:
        rows, source = load_rows(text), Path(text).name
    else:
        assert dataset is not None
        name, subset, split = parse_dataset(dataset)
        rows, source = load_dataset_rows(name, subset=subset, split=split, column=column), dataset
    tokens = build_windows(rows, tokenizer, source=source, window=window, windows=windows, bos=bos)
    chosen = choose_device(device)

    def hidden_of(model: str, label: str) -> StreamedPass:
        streamed = StreamedModel(
            open_any(model, allow_pickle=allow_pickle), chosen, trust_remote_code=trust_remote_code
        )
        _check_length(streamed, tokens)
        run = streamed.begin(tokens.tokens)
        run.run_all(lambda done, total: progress(f"{label}: layers", done, total))
        return run

    reference_run = None if reference is None else hidden_of(reference, "reference")
    run = hidden_of(checkpoint, "model")
    return evaluate_windows(tokens, run, reference_run, lambda done, total: progress("windows", done, total))


def _check_length(streamed: StreamedModel, tokens: Windows) -> None:
    """A window longer than the model's positions gives meaningless numbers, or none."""
    config = getattr(streamed.model, "config").get_text_config()  # noqa: B009  (nn.Module has no such attribute)
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and tokens.window > longest:
        raise UsageError(f"--window {tokens.window} is longer than the model's {longest} positions; use a shorter one")
