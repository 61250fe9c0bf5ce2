"""Perplexity and divergence of a checkpoint, streamed layer by layer from its own files."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from quantforge.errors import UsageError
from quantforge.evaluate.divergence import EvalResult, evaluate_windows
from quantforge.evaluate.protocol import Windows, build_windows, load_dataset_rows, load_rows, parse_dataset
from quantforge.model.packed import open_any
from quantforge.model.source import TensorSource
from quantforge.model.stored import as_stored
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
    subset: str | None = None,
    split: str | None = None,
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

    Quantized checkpoints are dequantized from their packed tensors; where their config quantizes activations too, the
    inputs of those sites are rounded while the model runs, and where it has scales for a cache, keys and values are
    rounded through them; the result says so. The tokenizer is the reference's
    when there is one, so that both models see the same tokens.

    Memory: the hidden states of all windows, float32, once for each model; beside them, while layers run, the largest
    decoder layer of one model, and while windows are scored, the outer weights (embeddings, head) of both models and
    the logits of one window from each.

    Args:
        text: a ``.txt`` or ``.raw`` file; exactly one of `text` and `dataset` is needed.
        dataset: a file, a directory or a hub id, which may carry subset and split: ``ID:subset:split``.
        subset, split, column: which part of `dataset` is read; `split` is ``test`` unless given.
        progress: called with (what, done, total).

    Raises:
        UsageError: not one text, a part of a text that has none, a window longer than the model's positions.
        CalibrationError: the text cannot be read or is shorter than one window.
        SourceError: a checkpoint cannot be read.
    """
    part = _part(text, dataset, subset, split, column)
    model = open_any(checkpoint, allow_pickle=allow_pickle)
    original = None if reference is None else open_any(reference, allow_pickle=allow_pickle)
    tokenizer = load_tokenizer((original or model).path, trust_remote_code=trust_remote_code)
    if part is None:
        assert text is not None
        rows, source = load_rows(text), Path(text).name
    else:
        name, subset, split = part
        rows = load_dataset_rows(name, subset=subset, split=split, column=column)
        source = ":".join([name, subset or "", split or ""]).rstrip(":")
    tokens = build_windows(rows, tokenizer, source=source, window=window, windows=windows, bos=bos)
    chosen = choose_device(device)

    def hidden_of(opened: TensorSource, label: str) -> StreamedPass:
        streamed = StreamedModel(opened, chosen, trust_remote_code=trust_remote_code)
        activations[label], caches[label] = hooks.enter_context(as_stored(streamed))  # until the logits are there
        _check_length(streamed, tokens)
        run = streamed.begin(tokens.tokens)
        streamed.drop_outer()  # the logits load it again
        run.run_all(lambda done, total: progress(f"{label}: layers", done, total))
        return run

    activations: dict[str, str | None] = {}
    caches: dict[str, str | None] = {}
    with ExitStack() as hooks:
        reference_run = None if original is None else hidden_of(original, "reference")
        run = hidden_of(model, "model")
        result = evaluate_windows(tokens, run, reference_run, lambda done, total: progress("windows", done, total))
    abouts = [about for found in (activations, caches) if (about := found.get("reference")) is not None]
    notes = (*result.notes, *(f"the reference has {about}" for about in abouts))
    return replace(result, activations=activations["model"], kv_cache=caches["model"], notes=notes)


def _part(
    text: str | None, dataset: str | None, subset: str | None, split: str | None, column: str | None
) -> tuple[str, str | None, str | None] | None:
    """(id, subset, split) of the data set, or None for a text; UsageError when the request contradicts itself."""
    if (text is None) == (dataset is None):
        raise UsageError("give exactly one of --text FILE and --dataset ID")
    if dataset is None:
        flags = {"--subset": subset, "--split": split, "--column": column}
        if given := [flag for flag, value in flags.items() if value is not None]:
            raise UsageError(f"{', '.join(given)}: these choose a part of --dataset, and --text FILE has no parts")
        return None
    name, named_subset, named_split = parse_dataset(dataset)
    for flag, value, named in (("--subset", subset, named_subset), ("--split", split, named_split)):
        if value is not None and named is not None and value != named:
            raise UsageError(f"{flag} {value} and --dataset {dataset} disagree; give one of them")
    return name, subset or named_subset, split or named_split


def _check_length(streamed: StreamedModel, tokens: Windows) -> None:
    """A window longer than the model's positions gives meaningless numbers, or none."""
    longest = streamed.positions
    if longest is not None and tokens.window > longest:
        raise UsageError(f"--window {tokens.window} is longer than the model's {longest} positions; use a shorter one")
