"""Temporary disk that a run will need, and whether there is as much."""

import os
import shutil
from pathlib import Path

from quantforge.model.streamed import StreamedModel
from quantforge.pipeline.workspace import SCRATCH, WEIGHTS_FILE, work_directory
from quantforge.recipe import Recipe
from quantforge.sizes import size_label

FLOAT_BYTES = 4


def plan_weighing(recipe: Recipe, streamed: StreamedModel, output: Path, problems: list[str], notes: list[str]) -> int:
    """Bytes for the inputs of all layers while calibration tokens are weighed, at most; 0 when an earlier run did that.

    Adds a note, or a problem where the disk of `output` has not got as much.
    """
    work = work_directory(output)
    if os.path.lexists(output) or os.path.lexists(work / WEIGHTS_FILE):
        return 0
    asked, layers = recipe.calibration, streamed.layout.layers
    hidden = int(streamed.text_config.hidden_size)
    seqlen = min(asked.seqlen, streamed.positions or asked.seqlen)
    needed_bytes = layers * asked.nsamples * seqlen * hidden * FLOAT_BYTES
    free_bytes = _free_bytes(work)
    if free_bytes is not None and needed_bytes > free_bytes:
        problems.append(
            f"weighing the calibration tokens takes up to {size_label(needed_bytes)} of temporary disk "
            f"({layers} layers x {asked.nsamples} x {seqlen} tokens x {hidden} x {FLOAT_BYTES} bytes), and beside "
            f"{output} {size_label(free_bytes)} are free; --token-weights none does without, fewer --nsamples with less"
        )
    notes.append(
        "calibration tokens are weighted by the gradient of the model's loss: a pass forward and backward, up to "
        f"{size_label(needed_bytes)} of temporary disk (--token-weights none does without)"
    )
    return needed_bytes


def _free_bytes(work: Path) -> int | None:
    """Free where a work directory is or will be, with what a killed run left there to be removed; None if unknown."""
    place = work.absolute()
    try:
        left = sum(file.stat().st_size for file in (work / SCRATCH).glob("*"))
        while not os.path.exists(place):
            place = place.parent
        return shutil.disk_usage(place).free + left
    except OSError:  # the run will meet it again, and say it about the file it cannot write
        return None
