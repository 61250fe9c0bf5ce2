"""The layers of a run, one after the other: observe, transform, solve, commit."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence

import torch
from torch import nn

from quantforge.calibration import CalibrationSet
from quantforge.errors import NumericsError
from quantforge.model.activations import quantized_inputs
from quantforge.model.observe import InputGroup, input_groups, observe, unobserved
from quantforge.model.streamed import StreamedPass
from quantforge.pipeline.influence import TokenWeights, shared_weights, token_weights
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.solve import put_back, solve_sites
from quantforge.pipeline.transform import LayerTransforms, Transformed
from quantforge.pipeline.workspace import Workspace
from quantforge.quantized import QuantizedWeight
from quantforge.recipe import Recipe
from quantforge.report import (
    Event,
    LayerDone,
    LayerReport,
    LayerStarted,
    LayerTransformed,
    SiteDone,
    SiteReport,
    Weighing,
)


def quantize_layers(
    recipe: Recipe, plan: Plan, workspace: Workspace, calibration: CalibrationSet | None
) -> Iterator[Event]:
    """Observe, solve and commit the layers that are not committed yet.

    Args:
        calibration: None when the method needs no statistics.
    """
    done = workspace.done()
    if done == plan.layers:
        return
    run: StreamedPass | None = None
    transforms: LayerTransforms | None = None
    of_tokens: TokenWeights = {}
    if calibration is None or not plan.needs_gram:
        plan.streamed.load_outer()  # only to find a missing or non-finite tensor before the work, not after
        plan.streamed.drop_outer()
    else:
        if recipe.token_weights == "gradient":
            of_tokens = yield from _token_weights(plan, workspace, calibration)
        run = plan.streamed.begin(calibration.tokens)
        transforms = LayerTransforms(plan, run) if plan.transforms else None
        plan.streamed.drop_outer()
        if done:
            run.hidden = workspace.hidden(done)
    for index in range(done, plan.layers):
        started = time.monotonic()
        yield LayerStarted(index)
        layer = plan.streamed.load_layer(index)
        sites = {site.module: site for site in plan.sites if site.layer == index}
        modules = {site.module: plan.streamed.model.get_submodule(site.module) for site in sites.values()}
        quantized: dict[str, QuantizedWeight] = {}
        reports: list[SiteReport] = []
        weights = shared_weights(of_tokens, run, index, sites, modules) if run is not None and of_tokens else {}
        changed: Transformed | None = None
        if transforms is not None and modules:
            changed = transforms.apply(index, modules, weights)
            yield LayerTransformed(index, changed.reports)
        with quantized_inputs(modules.values(), plan.activations):  # what is observed is what the sites will be given
            for group in _stages(recipe, run, index, modules, changed, weights):
                solved = solve_sites(plan, [sites[name] for name in group.names], modules, group)
                for site, weight, report in solved:
                    put_back(modules[site.module], weight)
                    quantized[site.name] = weight
                    reports.append(report)
                    yield SiteDone(report)
            if run is not None and index + 1 < plan.layers:
                run.advance(index)
                _require_finite(run.hidden, index)
        del layer
        plan.streamed.drop_layer(index)
        remarks, folds = (changed.warnings, changed.reports) if changed is not None else ((), ())
        layer_report = LayerReport(index, tuple(reports), (*remarks, *_warnings(reports)), folds)
        last = index + 1 == plan.layers
        floats = changed.floats if changed is not None else {}
        workspace.commit(index, quantized, layer_report, None if run is None or last else run.hidden, floats)
        yield LayerDone(layer_report, time.monotonic() - started)


def _stages(
    recipe: Recipe,
    run: StreamedPass | None,
    index: int,
    modules: Mapping[str, nn.Module],
    changed: Transformed | None,
    weights: TokenWeights,
) -> Iterator[InputGroup]:
    """Input groups with their statistics; by group, each is observed after the earlier ones were quantized."""
    if not modules:
        return
    if run is None:
        for name in modules:
            yield unobserved(name)
    elif recipe.sequential == "layer" and changed is not None:
        yield from changed.groups
    elif recipe.sequential == "layer":
        yield from observe(run, index, modules, weights=weights)
    else:
        for names in input_groups(run, index, modules):
            yield from observe(run, index, {name: modules[name] for name in names}, weights=weights)


def _require_finite(hidden: torch.Tensor, layer: int) -> None:
    if not bool(torch.isfinite(hidden).all()):
        bad = int((~torch.isfinite(hidden)).any(-1).sum())
        raise NumericsError(f"layer {layer}: the output is not finite for {bad} of {hidden[..., 0].numel()} tokens")


def _warnings(reports: Sequence[SiteReport]) -> Iterator[str]:
    for report in reports:
        if report.fallback is not None:
            yield f"{report.name}: {report.fallback}"
        elif report.damping_steps:
            yield f"{report.name}: damping raised {report.damping_steps} times, to {report.damping}"
        if 0 < report.tokens < report.in_features:
            yield (
                f"{report.name}: {report.tokens} calibration tokens for {report.in_features} inputs; raise --nsamples"
            )
        if report.dead_inputs:
            yield f"{report.name}: {report.dead_inputs} of {report.in_features} inputs were never active"


def _token_weights(
    plan: Plan, workspace: Workspace, calibration: CalibrationSet
) -> Generator[Event, None, TokenWeights]:
    """What an earlier run found, or a new pass over the model, whose result is kept."""
    weights = workspace.token_weights()
    if weights is None:
        with workspace.scratch() as directory:
            steps = token_weights(plan, calibration.tokens, directory)
            while True:
                try:
                    done, total = next(steps)
                except StopIteration as stop:
                    weights = stop.value
                    break
                yield Weighing(done, total)
        workspace.keep_token_weights(weights)
    return weights
