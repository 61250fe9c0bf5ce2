"""How much memory and time quantizing will take, roughly, from shapes alone. What is assumed is said beside it.

Memory is that of the process at its largest, stage by stage; weights are float32 while they are computed with. Time is
a count of multiplications and additions, at two speeds to choose from.
"""

import resource
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from quantforge.model.sampling import SEQUENCES_AT_ONCE
from quantforge.model.shards import DTYPES
from quantforge.model.source import Checkpoint
from quantforge.model.streamed import TOKENS_PER_BATCH
from quantforge.pipeline.calibrate import FROM_MODEL, token_source
from quantforge.pipeline.job import needs_tokens
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.serving import cache_bytes, layer_caches
from quantforge.pipeline.tuning_cost import FLOAT_BYTES, tuning_bytes
from quantforge.recipe import Recipe

RUNTIME_BYTES = 45_000_000
"""What a run adds to a process that has planned: tokenizer, thread pools, buffers of files."""

SOLVER_SQUARES = 8
"""Matrices [in, in] in float32 that solving one input group holds: gram, factor, copies in the order of visiting."""

SOLVER_COPIES = 6
"""Matrices of the size of the stacked weights that solving one input group holds."""

SAMPLER_ROWS = 4
"""Of the size of the vocabulary, in float32, that choosing the next token of a sequence holds."""

SLOW, FAST = 50e9, 10e12
"""Operations a second that are assumed: of one CPU core, and of a GPU."""

MEMORY_ASSUMES = "float32 while computing; layers one at a time; this process's own memory included"
TIME_ASSUMES = (
    "operations counted from shapes, at 50 GFLOP/s (one CPU core) and 10 TFLOP/s (a GPU); loading not counted"
)


@dataclass(frozen=True)
class Estimate:
    """Attributes: `stages` are (what, bytes), the process's memory while it does that; `operations` a count."""

    stages: tuple[tuple[str, int], ...]
    operations: float

    @property
    def peak(self) -> tuple[str, int]:
        """The stage that takes most."""
        return max(self.stages, key=lambda stage: stage[1])

    def seconds(self, operations_per_second: float) -> float:
        return self.operations / operations_per_second


def estimate(recipe: Recipe, plan: Plan) -> Estimate:
    """Memory and operations of carrying out `plan`."""
    sizes = _Sizes(recipe, plan)
    base = process_bytes() + RUNTIME_BYTES
    stages = tuple((what, base + extra) for what, extra in _stages(recipe, plan, sizes))
    return Estimate(stages, sum(_operations(recipe, plan, sizes)))


def process_bytes() -> int:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Sizes:
    """Counts of parameters and tokens."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        model, prefix = plan.streamed.model, f"{plan.streamed.layout.stack}."
        layers: Counter[str] = Counter()
        self.outer = 0
        for name, parameter in model.named_parameters():
            if name.startswith(prefix):
                layers[name.removeprefix(prefix).partition(".")[0]] += parameter.numel()
            else:
                self.outer += parameter.numel()
        self.layer, self.layers = max(layers.values()), sum(layers.values())
        text = plan.streamed.text_config
        self.hidden, self.vocabulary = int(text.hidden_size), int(text.vocab_size)
        self.seqlen = min(recipe.calibration.seqlen, plan.streamed.positions or recipe.calibration.seqlen)
        self.tokens = recipe.calibration.nsamples * self.seqlen
        first = plan.sites_of(0) or {site.module: site for site in plan.sites if site.layer == plan.sites[0].layer}
        self.widths = sum(site.in_features + site.out_features for site in first.values())
        self.heads = int(getattr(text, "num_attention_heads", 0) or 0)


def _stages(recipe: Recipe, plan: Plan, sizes: _Sizes) -> Iterator[tuple[str, int]]:
    """(what, bytes beside the process's own)."""
    source = plan.streamed.source
    assert isinstance(source, Checkpoint)
    sites = {f"{site.name}.weight" for site in plan.sites}
    others = [i for key, i in source.tensors.items() if key not in sites and DTYPES[i.dtype].is_floating_point]
    largest = max(others, key=lambda info: info.total_bytes)
    read = largest.total_bytes + largest.total_bytes // DTYPES[largest.dtype].itemsize  # as stored, and a mask
    outer, layer = FLOAT_BYTES * sizes.outer, FLOAT_BYTES * sizes.layer
    yield "loading embeddings and head", outer + read
    yield "reading the output back", 2 * largest.total_bytes
    if not needs_tokens(recipe, plan):
        yield "rounding a layer", 3 * layer
        return
    if token_source(recipe, plan) == FROM_MODEL:
        count = min(SEQUENCES_AT_ONCE, recipe.calibration.nsamples)
        kept = 2 * cache_bytes(layer_caches(plan.streamed.text_config), sizes.seqlen, count, 16)
        kept += FLOAT_BYTES * SAMPLER_ROWS * count * sizes.vocabulary
        whole = FLOAT_BYTES * (sizes.outer + sizes.layers)
        yield "sampling calibration tokens from the whole model", whole + read + kept
    hidden = FLOAT_BYTES * sizes.tokens * sizes.hidden
    scores = sizes.heads * TOKENS_PER_BATCH * sizes.seqlen
    activations = FLOAT_BYTES * (TOKENS_PER_BATCH * sizes.widths + scores)
    yield "running the first layer", outer + layer + hidden + activations
    grams = {site.in_features for site in plan.sites}
    squares = FLOAT_BYTES * sum(width**2 for width in grams) + FLOAT_BYTES * SOLVER_SQUARES * max(grams) ** 2
    stacked = max(site.out_features * site.in_features for site in plan.sites) * 2
    yield "solving a layer", layer + hidden + max(activations, squares + FLOAT_BYTES * SOLVER_COPIES * stacked)
    if recipe.budget is not None or (plan.needs_gram and recipe.token_weights == "gradient"):
        head = outer + FLOAT_BYTES * 4 * sizes.seqlen * sizes.vocabulary
        yield "weighing calibration tokens", 2 * hidden + max(head, layer + 3 * activations)
    if recipe.tune_epochs:
        yield "tuning", tuning_bytes(plan.streamed, plan.sites, plan.specs, sizes.seqlen)


def _operations(recipe: Recipe, plan: Plan, sizes: _Sizes) -> Iterator[float]:
    """Of each stage; a pass forward takes two operations a weight and token, backward another four."""
    if not needs_tokens(recipe, plan):
        yield 20.0 * plan.weights
        return
    forward = 2.0 * sizes.layers * sizes.tokens
    whole = forward + 2.0 * sizes.outer * sizes.tokens
    if token_source(recipe, plan) == FROM_MODEL:
        yield whole
    if recipe.budget is not None or (plan.needs_gram and recipe.token_weights == "gradient"):
        yield forward + 3 * whole
    if plan.kv_cache is not None:
        yield forward if plan.needs_gram else 2 * forward
    if plan.needs_gram:
        yield forward if recipe.sequential == "none" else 2 * forward
        widths = Counter((site.layer, site.in_features) for site in plan.sites)
        yield sum(1.25 * sizes.tokens * width**2 for _, width in widths)
    yield sum(8.0 * site.out_features * site.in_features**2 for site in plan.sites)
    yield 6.0 * recipe.tune_epochs * (sizes.outer + sizes.layers) * sizes.tokens
