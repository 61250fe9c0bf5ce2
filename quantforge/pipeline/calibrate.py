"""The calibration tokens of a run: from text, or sampled from the model itself."""

from collections.abc import Generator
from typing import Any

from quantforge.calibration import CalibrationSet, build_calibration
from quantforge.errors import QuantforgeError
from quantforge.model.sampling import sample_sequences
from quantforge.model.tokenizer import load_tokenizer
from quantforge.pipeline.plan import Plan
from quantforge.recipe import Recipe
from quantforge.report import Event, Sampling

FROM_MODEL = "self"


def calibrate(recipe: Recipe, plan: Plan) -> Generator[Event, None, CalibrationSet | None]:
    """The tokens, or None for a method that needs no statistics; an event announces what takes long.

    Raises CalibrationError when the text does not do, QuantforgeError when tokenizer and weights do not fit.
    """
    if not plan.solver.needs_gram:
        return None
    asked = recipe.calibration
    config: Any = plan.streamed.model.config
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked.dataset == FROM_MODEL:
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
        dataset=asked.dataset,
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
    return calibration
