"""The calibration tokens of a run: from text, or sampled from the model itself (why: docs/calibration.md)."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from quantforge.calibration import CalibrationSet, build_calibration
from quantforge.errors import QuantforgeError
from quantforge.model.memory import memory_bytes
from quantforge.model.sampling import sample_sequences
from quantforge.model.tokenizer import load_tokenizer
from quantforge.pipeline.plan import Plan
from quantforge.recipe import Recipe
from quantforge.report import Event, Sampling

FROM_MODEL = "self"
BUILTIN = "builtin"
MEMORY_SHARE = 0.5
"""The model in float32 may take this share of the device's memory to be loaded whole for sampling by default."""


def calibrate(recipe: Recipe, plan: Plan) -> Generator[Event, None, CalibrationSet | None]:
    """The tokens, or None for a method that needs no statistics and no budget; an event announces what takes long.

    Raises CalibrationError when the text does not do, QuantforgeError when tokenizer and weights do not fit.
    """
    if not plan.needs_gram and recipe.budget is None and not recipe.tune_epochs:
        return None
    asked = recipe.calibration
    config: Any = plan.streamed.model.config
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    dataset, notes = (asked.dataset, ()) if asked.dataset is not None else _default_source(plan)
    if dataset == FROM_MODEL:
        seqlen = min(asked.seqlen, longest or asked.seqlen)
        yield Sampling(asked.nsamples, seqlen)
        tokens = sample_sequences(
            plan.checkpoint.path,
            asked.nsamples,
            seqlen,
            device=str(plan.streamed.device),
            trust_remote_code=recipe.trust_remote_code,
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
