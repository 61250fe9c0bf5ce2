"""The layers of one job, one after the other: observe, transform, solve, put back, commit."""

import time
from collections.abc import Generator, Iterator, Mapping

from torch import nn

from quantforge.model.activations import quantized_inputs
from quantforge.model.observe import InputGroup, input_groups, observe, unobserved
from quantforge.model.streamed import StreamedPass
from quantforge.numerics.metrics import require_finite
from quantforge.pipeline.cache import CalibratedCache, calibrate_cache, calibrated
from quantforge.pipeline.influence import TokenWeights, shared_weights
from quantforge.pipeline.job import Job
from quantforge.pipeline.solve import put_back, solve_sites
from quantforge.pipeline.together import can_share, commit_layer, solve_together
from quantforge.pipeline.transform import LayerTransforms, Transformed, rows_per_batch
from quantforge.quantized import QuantizedWeight
from quantforge.report import Event, LayerDone, LayerStarted, LayerTransformed, SiteDone, SiteReport


def solve_layers(job: Job, of_tokens: TokenWeights) -> Generator[Event, None, None]:
    """Observe, solve and commit the layers of a job that are not committed yet.

    Args:
        of_tokens: from `influence.gather_weights`; sites without any count all tokens alike.
    """
    if can_share([job]):
        for _, event in solve_together([job], of_tokens):
            yield event
    elif job.unsolved:
        yield from _solve_on_own_inputs(job, of_tokens)


def _solve_on_own_inputs(job: Job, of_tokens: TokenWeights) -> Iterator[Event]:
    """Every layer sees what the quantized layers before it give, with their keys and values as a cache gives them."""
    plan, workspace, calibration = job.plan, job.workspace, job.calibration
    assert calibration is not None
    done = workspace.done()
    run = plan.streamed.begin(calibration.tokens)
    transforms = LayerTransforms(plan, run) if plan.transforms else None
    plan.streamed.drop_outer()
    if done:
        run.hidden = workspace.hidden(done)
    for index in range(done, plan.layers):
        started = time.monotonic()
        yield LayerStarted(index)
        plan.streamed.load_layer(index)
        sites, modules = plan.sites_of(index), plan.modules_of(index)
        quantized: dict[str, QuantizedWeight] = {}
        reports: list[SiteReport] = []
        weights = shared_weights(of_tokens, run, index, sites, modules) if of_tokens else {}
        changed: Transformed | None = None
        if transforms is not None and modules:
            observed = observe(run, index, modules, rows_per_batch(plan, run, index), weights)
            changed = transforms.apply(index, modules, observed, weights)
            yield LayerTransformed(index, changed.reports)
        cache: CalibratedCache | None = None
        with quantized_inputs(modules.values(), plan.activations):  # what is observed is what the sites will be given
            for group in _stages(job, run, index, modules, changed, weights):
                for site, weight, report in solve_sites(plan, [sites[name] for name in group.names], modules, group):
                    put_back(modules[site.module], weight)
                    quantized[site.name] = weight
                    reports.append(report)
                    yield SiteDone(report)
            if plan.kv_cache is not None:
                cache = calibrate_cache(run, index, plan.kv_cache)
            last = index + 1 == plan.layers
            if not last:
                with calibrated(run, index, cache, plan.kv_cache):
                    run.advance(index)
                require_finite(run.hidden, f"layer {index}: the output")
        plan.streamed.drop_layer(index)
        solved = commit_layer(workspace, index, quantized, reports, changed, None if last else run.hidden, cache)
        yield LayerDone(solved, time.monotonic() - started)


def _stages(
    job: Job,
    run: StreamedPass,
    index: int,
    modules: Mapping[str, nn.Module],
    changed: Transformed | None,
    weights: TokenWeights,
) -> Iterator[InputGroup]:
    """Input groups, with statistics if the method wants any; by group, each is observed after those before it."""
    if not modules:
        return
    sequential = job.recipe.sequential
    if not job.plan.needs_gram:
        yield from map(unobserved, modules)
    elif sequential == "layer" and changed is not None:
        yield from changed.groups
    elif sequential == "layer":
        yield from observe(run, index, modules, weights=weights)
    else:
        for names in input_groups(run, index, modules):
            yield from observe(run, index, {name: modules[name] for name in names}, weights=weights)
