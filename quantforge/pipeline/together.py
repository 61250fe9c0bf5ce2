"""Layers solved on the inputs of the original model, for any number of jobs at once.

With ``sequential: none`` no layer is put back: what is observed does not depend on what any job makes of it. Each layer
is loaded and observed once, in the same pass that computes the next layer's inputs, and solved for one job after
another; that there are several changes nothing for any of them. Jobs that observe nothing go along.

Two things about statistics: where activations are rounded, those of a site are of its rounded inputs, while the layer
itself, and those that follow, go on with the inputs of the original model. Before a transform inputs are never rounded,
since their rounding is what it changes. A transform changes the layer itself, which is read again for the next job.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from quantforge.model.observe import InputGroup, observe, unobserved
from quantforge.model.sites import LinearSite
from quantforge.numerics.metrics import require_finite
from quantforge.pipeline.cache import CalibratedCache
from quantforge.pipeline.influence import TokenWeights, shared_weights
from quantforge.pipeline.job import Job
from quantforge.pipeline.solve import layer_report, solve_sites
from quantforge.pipeline.transform import LayerTransforms, Transformed, rows_per_batch
from quantforge.pipeline.workspace import Workspace
from quantforge.quantized import QuantizedWeight
from quantforge.report import Event, LayerDone, LayerReport, LayerStarted, LayerTransformed, SiteDone, SiteReport
from quantforge.spec import ActivationSpec


def can_share(jobs: Sequence[Job]) -> bool:
    """Whether no job's statistics depend on what it makes of earlier layers."""
    return all(job.recipe.sequential == "none" or not job.observed for job in jobs)


def solve_together(jobs: Sequence[Job], of_tokens: TokenWeights) -> Iterator[tuple[Job, Event]]:
    """Solve and commit the layers that are not committed yet, of jobs for which `can_share` holds.

    Their plans share one `StreamedModel`, and their calibration tokens are the same. In memory at a time are one layer,
    its statistics and one job's codes.

    Args:
        of_tokens: from `influence.gather_weights`; sites without any count all tokens alike.
    """
    done = {job: job.workspace.done() for job in jobs if job.unsolved}
    if not done:
        return
    streamed = jobs[0].plan.streamed
    streamed.load_outer()  # observed or not: a missing or non-finite tensor is found before the work, not after
    observed = [job for job in done if job.observed]
    original = _Original(observed, of_tokens) if observed else None
    streamed.drop_outer()
    for index in range(min(done.values()), len(streamed.layers)):
        todo = [job for job in done if done[job] <= index]
        started = time.monotonic()
        yield todo[0], LayerStarted(index)
        streamed.load_layer(index)
        groups = original.observe(index, todo) if original is not None else {}
        for job in todo:
            if job is not todo[0]:
                yield job, LayerStarted(index)
            changed: Transformed | None = None
            if original is not None and job in original.transforms and job in groups:
                changed = original.transforms[job].apply(
                    index, job.plan.modules_of(index), groups[job], original.weights[job]
                )
                yield job, LayerTransformed(index, changed.reports)
            quantized, reports = {}, []
            for site, weight, report in _solved(job, index, changed.groups if changed else groups.get(job)):
                quantized[site.name] = weight
                reports.append(report)
                yield job, SiteDone(report)
            hidden = original.output(index) if original is not None and job.observed else None
            solved = commit_layer(job.workspace, index, quantized, reports, changed, hidden)
            yield job, LayerDone(solved, time.monotonic() - started)
            started = time.monotonic()
            if any(fold.kept for fold in solved.transforms) and job is not todo[-1]:
                streamed.drop_layer(index)
                streamed.load_layer(index)
        streamed.drop_layer(index)


def commit_layer(
    workspace: Workspace,
    index: int,
    quantized: Mapping[str, QuantizedWeight],
    reports: Sequence[SiteReport],
    changed: Transformed | None,
    hidden: torch.Tensor | None,
    cache: CalibratedCache | None = None,
) -> LayerReport:
    """Make a solved layer durable, with the next layer's input where there is one; returns its report."""
    folds, remarks, floats = (changed.reports, changed.warnings, changed.floats) if changed else ((), (), {})
    cache = cache or CalibratedCache()
    solved = replace(layer_report(index, reports, folds, (*remarks, *cache.warnings)), cache=cache.reports)
    workspace.commit(index, quantized, solved, hidden, floats, cache.scales)
    return solved


def _solved(
    job: Job, index: int, groups: Sequence[InputGroup] | None
) -> Iterator[tuple[LinearSite, QuantizedWeight, SiteReport]]:
    """The sites of a layer, solved; `groups` None: without statistics."""
    sites, modules = job.plan.sites_of(index), job.plan.modules_of(index)
    for group in [unobserved(name) for name in modules] if groups is None else groups:
        yield from solve_sites(job.plan, [sites[name] for name in group.names], modules, group)


class _Original:
    """The original model's pass over the calibration tokens, from the first layer that some job has not committed.

    Attributes:
        transforms: of the jobs that have any.
        weights: of the tokens at the layer observed last, by module path, for each job that observed it.
    """

    def __init__(self, jobs: Sequence[Job], of_tokens: TokenWeights) -> None:
        """The outer weights must be loaded. `jobs` are observed and have layers left."""
        calibration, streamed = jobs[0].calibration, jobs[0].plan.streamed
        assert calibration is not None
        self.of_tokens = of_tokens
        self.weights: dict[Job, TokenWeights] = {}
        self.run = streamed.begin(calibration.tokens)
        self._layers = len(streamed.layers)
        least = min(jobs, key=lambda job: job.workspace.done())
        self._start = least.workspace.done()
        if self._start:
            self.run.hidden = least.workspace.hidden(self._start)
        size = self.run.batch_size
        self._first_batch = replace(  # transforms look at a layer's inputs when these have given way to its outputs
            self.run,
            tokens=self.run.tokens[:size],
            calls=[calls[:1] for calls in self.run.calls],
            hidden=self.run.hidden[:size],
        )
        self.transforms = {job: LayerTransforms(job.plan, self._first_batch) for job in jobs if job.plan.transforms}

    def observe(self, index: int, jobs: Sequence[Job]) -> dict[Job, list[InputGroup]]:
        """Statistics of the loaded layer `index` for the jobs that ask for any, and on to the next layer's inputs.

        The layer runs once, unless jobs differ in their sites or in how activations are rounded.
        """
        if index < self._start:
            return {}
        if self.transforms:
            self._first_batch.hidden = self.run.hidden[: self.run.batch_size].clone()
        alike: dict[tuple[tuple[str, ...], ActivationSpec | None], list[Job]] = {}
        for job in jobs:
            if job.observed and (sites := job.plan.sites_of(index)):
                rounded = None if job.plan.transforms else job.plan.activations
                alike.setdefault((tuple(sites), rounded), []).append(job)
        last = index + 1 == self._layers
        found: dict[Job, list[InputGroup]] = {}
        for number, ((_, rounded), own) in enumerate(alike.items(), 1):
            sites, modules = own[0].plan.sites_of(index), own[0].plan.modules_of(index)
            weights = shared_weights(self.of_tokens, self.run, index, sites, modules) if self.of_tokens else {}
            rows = [rows for job in own if (rows := rows_per_batch(job.plan, self.run, index)) is not None]
            advance = number == len(alike) and not last
            groups = observe(self.run, index, modules, max(rows, default=None), weights, rounded, advance)
            found |= dict.fromkeys(own, groups)
            self.weights |= dict.fromkeys(own, weights)
        if not alike and not last:
            self.run.advance(index)
        require_finite(self.run.hidden, f"layer {index}: the output")
        return found

    def output(self, index: int) -> torch.Tensor | None:
        """What layer `index` gave, [samples, length, hidden]; None when it is the last, whose output nobody needs."""
        return None if index + 1 == self._layers else self.run.hidden
