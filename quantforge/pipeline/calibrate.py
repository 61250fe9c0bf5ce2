"""The calibration tokens of a run: from text, or sampled from the model itself (why: docs/calibration.md)."""

import json
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from quantforge import __version__
from quantforge.calibration import CalibrationSet, build_calibration
from quantforge.errors import QuantforgeError
from quantforge.model.memory import memory_bytes
from quantforge.model.sampling import sample_sequences
from quantforge.model.skeleton import transformers_version
from quantforge.model.tokenizer import load_tokenizer
from quantforge.pipeline.job import Job, needs_tokens
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.workspace import sampled_tokens
from quantforge.recipe import Recipe
from quantforge.report import Event, Sampling

FROM_MODEL = "self"
BUILTIN = "builtin"
MEMORY_SHARE = 0.5
"""The model in float32 may take this share of the device's memory to be loaded whole for sampling by default."""


def calibrate(recipe: Recipe, plan: Plan, works: Sequence[Path]) -> Generator[Event, None, CalibrationSet | None]:
    """The tokens, or None for a method that needs no statistics and no budget; an event announces what takes long.

    Args:
        works: work directories, there or not; tokens that an earlier run sampled and kept in one are used again.

    Raises CalibrationError when the text does not do, QuantforgeError when tokenizer and weights do not fit.
    """
    if not needs_tokens(recipe, plan):
        return None
    asked, longest = recipe.calibration, plan.streamed.positions
    dataset, notes = _source(recipe, plan)
    if dataset == FROM_MODEL:
        request, seqlen = _sampling_request(recipe, plan), min(asked.seqlen, longest or asked.seqlen)
        tokens = next((found for work in works if (found := sampled_tokens(work, request)) is not None), None)
        if tokens is None:
            yield (sampling := Sampling(asked.nsamples, seqlen))
            tokens = sample_sequences(
                plan.checkpoint.path,
                asked.nsamples,
                seqlen,
                device=str(plan.streamed.device),
                trust_remote_code=recipe.trust_remote_code,
                progress=sampling.progress,
            )
        return CalibrationSet(tokens, "sampled from the model itself, temperature 1, seed 0", asked.nsamples, bos=False)
    calibration = build_calibration(
        load_tokenizer(plan.checkpoint.path, trust_remote_code=recipe.trust_remote_code),
        dataset=dataset,
        nsamples=asked.nsamples,
        seqlen=asked.seqlen,
        split=asked.split,
        column=asked.column,
        subset=asked.subset,
        bos=asked.bos,
        max_position=longest,
    )
    vocabulary = int(plan.streamed.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    if int(calibration.tokens.max()) >= vocabulary:
        raise QuantforgeError(
            f"the tokenizer gives token {int(calibration.tokens.max())}, the model has {vocabulary} embeddings; "
            "tokenizer and weights do not belong together"
        )
    return replace(calibration, notes=notes + calibration.notes)


def keep_sampled(job: Job) -> None:
    """Tokens that took long to sample go into the work directory, for `calibrate` to find."""
    if job.calibration is not None and _source(job.recipe, job.plan)[0] == FROM_MODEL:
        job.workspace.keep_sampled_tokens(job.calibration.tokens, _sampling_request(job.recipe, job.plan))


def _sampling_request(recipe: Recipe, plan: Plan) -> str:
    """Everything that sampled tokens depend on."""
    return json.dumps(
        {
            "quantforge": __version__,
            "torch": torch.__version__,
            "transformers": transformers_version(),
            "threads": torch.get_num_threads(),
            "device": str(plan.streamed.device),
            "model": plan.checkpoint.fingerprint(),
            "files": plan.checkpoint.file_times(),
            "nsamples": recipe.calibration.nsamples,
            "seqlen": recipe.calibration.seqlen,
        },
        sort_keys=True,
    )


def token_source(recipe: Recipe, plan: Plan) -> str:
    """The dataset that calibration tokens come from, the default one where none is given."""
    return _source(recipe, plan)[0]


def _source(recipe: Recipe, plan: Plan) -> tuple[str, tuple[str, ...]]:
    """Where the tokens come from, and what to say about it."""
    return (recipe.calibration.dataset, ()) if recipe.calibration.dataset is not None else _default_source(plan)


def _default_source(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """What to calibrate on when nothing is said, and why: the model's own samples, unless it is too large for that."""
    needed_bytes = 4 * sum(parameter.numel() for parameter in plan.streamed.model.parameters())
    available_bytes = memory_bytes(plan.streamed.device)
    if needed_bytes <= MEMORY_SHARE * available_bytes:
        return FROM_MODEL, ()
    return BUILTIN, (
        f"calibrating on the built-in text: the model takes {needed_bytes / 1e9:.1f} GB whole, too much of "
        f"{available_bytes / 1e9:.1f} GB to sample from it; text of your own serves better: --dataset FILE",
    )
