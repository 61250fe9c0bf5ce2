"""Several outputs of one model in one run: what need not be repeated is done once.

Calibration tokens and their weights are the same for all. The layers are, too, where no output's statistics depend on
what it makes of earlier layers (`together`); else they are gone through again for each. Every output has its own work
directory, fingerprint and report, and its bytes are those of a run of its own: what is shared is kept in each work
directory, so that any of them can also be carried on alone.
"""

import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from quantforge.errors import PlanError, QuantforgeError, UsageError
from quantforge.pipeline.calibrate import calibrate
from quantforge.pipeline.files import disk_errors
from quantforge.pipeline.influence import gather_weights
from quantforge.pipeline.job import Job, needs_tokens
from quantforge.pipeline.layers import solve_layers
from quantforge.pipeline.manifest import REPORT_FILE
from quantforge.pipeline.plan import Plan, make_plan
from quantforge.pipeline.run import (
    already_published,
    begin,
    fingerprint_of,
    finish,
    open_job,
    refuse_foreign_output,
)
from quantforge.pipeline.together import can_share, solve_together
from quantforge.pipeline.workspace import work_directory
from quantforge.recipe import Recipe, variant_name
from quantforge.report import Event, VariantEvent, VariantsStarted

T = TypeVar("T")

ALIKE = ("model", "calibration", "sequential", "token_weights", "device", "trust_remote_code", "allow_pickle")
"""Settings that one run has only one of."""


def plan_many(recipes: Sequence[Recipe]) -> list[tuple[Recipe, Plan]]:
    """Plans of several variants; an `output` that all of them give is the directory that holds theirs, by name.

    Raises UsageError or PlanError with the problems of all variants, each with the names of those it concerns.
    """
    _require_alike(recipes)
    jobs: list[tuple[Recipe, Plan]] = []
    problems: dict[str, list[str]] = {}
    wrong_requests = False
    for recipe in recipes:
        streamed = jobs[0][1].streamed if jobs else None
        try:
            plan = make_plan(recipe, streamed)
        except (UsageError, PlanError) as error:
            wrong_requests |= isinstance(error, UsageError)
            for problem in error.problems if isinstance(error, PlanError) else [str(error)]:
                problems.setdefault(problem, []).append(variant_name(recipe, recipe.group_size))
            continue
        if recipe.output is not None and sum(other.output == recipe.output for other in recipes) > 1:
            output = Path(recipe.output) / variant_name(recipe, plan.spec.group_size)
            recipe, plan = recipe.model_copy(update={"output": str(output)}), replace(plan, output=output)
        jobs.append((recipe, plan))
    if problems:
        lines = [f"{', '.join(names)}: {problem}" for problem, names in problems.items()]
        raise UsageError("\n".join(lines)) if wrong_requests else PlanError(lines)
    _require_apart([plan for _, plan in jobs])
    return jobs


def quantize_many(jobs: Sequence[tuple[Recipe, Plan]]) -> Iterator[Event]:
    """Carry out several plans for one model; each output is verified and published as soon as it is complete.

    What concerns one of them comes as a VariantEvent, among those a RunFinished for each. Interrupted at any moment,
    the same call leaves finished outputs alone and carries the others on. Raises QuantforgeError subclasses, UsageError
    for jobs that cannot be done in one run; an error stops the run.
    """
    _require_alike([recipe for recipe, _ in jobs])
    _require_apart([plan for _, plan in jobs])
    streamed = jobs[0][1].streamed
    named = dict(zip(_names(jobs), [(recipe, replace(plan, streamed=streamed)) for recipe, plan in jobs], strict=True))
    with disk_errors(*(work_directory(plan.output) for _, plan in jobs)):
        yield from _quantize_many(named)


def _quantize_many(named: dict[str, tuple[Recipe, Plan]]) -> Iterator[Event]:
    for _, plan in named.values():
        refuse_foreign_output(plan)
    asking = next((job for job in named.values() if needs_tokens(*job)), None)
    calibration = None
    if asking is not None:
        calibration = yield from calibrate(*asking, [work_directory(plan.output) for _, plan in named.values()])
    with ExitStack() as stack:
        published: dict[str, Generator[Event, None, None]] = {}
        opened: dict[str, Job] = {}
        for name, (recipe, plan) in named.items():
            own = calibration if needs_tokens(recipe, plan) else None
            fingerprint = fingerprint_of(recipe, plan, own)
            with _told(name):
                if os.path.lexists(plan.output):
                    published[name] = already_published(recipe, plan, fingerprint)
                else:
                    opened[name] = stack.enter_context(open_job(recipe, plan, own, fingerprint))
        yield VariantsStarted(tuple(named), _notes(list(opened.values())))
        for name, events in published.items():
            yield from _of(name, events)
        jobs: dict[Job, str] = {}
        for name, job in opened.items():
            begun = yield from _of(name, begin(job))
            jobs[begun] = name
        of_tokens = yield from gather_weights(list(jobs))
        if can_share(list(jobs)):
            for solved, event in solve_together(list(jobs), of_tokens):
                yield VariantEvent(jobs[solved], event)
        for job, name in jobs.items():
            yield from _of(name, solve_layers(job, of_tokens))
            yield from _of(name, finish(job))


def _notes(jobs: Sequence[Job]) -> tuple[str, ...]:
    """What cannot be shared, and why."""
    count = sum(job.observed and job.unsolved for job in jobs)
    if can_share(jobs) or count < 2:
        return ()
    mode = jobs[0].recipe.sequential
    return (
        f"calibrated again for each of {count} variants, because sequential: {mode} feeds each its own quantized "
        "inputs; --sequential none shares the pass",
    )


def _of(name: str, events: Generator[Event, None, T]) -> Generator[Event, None, T]:
    """The events as those of a variant; errors say which."""
    try:
        with _told(name):
            while True:
                try:
                    event = next(events)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                yield VariantEvent(name, event)
    finally:
        events.close()


@contextmanager
def _told(name: str) -> Iterator[None]:
    """An error within says which variant it is about."""
    try:
        yield
    except QuantforgeError as error:
        error.args = (f"{name}: {error}",)
        raise


# ------------------------------------------------------------------------------------------------ what goes together


def _names(jobs: Sequence[tuple[Recipe, Plan]]) -> list[str]:
    """Short names, or outputs where these are not enough to tell variants apart."""
    names = [variant_name(recipe, plan.spec.group_size) for recipe, plan in jobs]
    return names if len(set(names)) == len(names) else [str(plan.output) for _, plan in jobs]


def _require_alike(recipes: Sequence[Recipe]) -> None:
    differing = [name for name in ALIKE if any(getattr(r, name) != getattr(recipes[0], name) for r in recipes)]
    if differing:
        values = "; ".join(
            f"{name}: {', '.join(dict.fromkeys(repr(getattr(recipe, name)) for recipe in recipes))}"
            for name in differing
        )
        raise UsageError(
            f"variants made in one run must agree in {', '.join(differing)} ({values}); run them one by one"
        )


def _require_apart(plans: Sequence[Plan]) -> None:
    """No two outputs in one place, none inside of a checkpoint."""
    counts = Counter(plan.output.absolute() for plan in plans)
    if repeated := [str(output) for output, count in counts.items() if count > 1]:
        raise UsageError(f"several variants would be written to {', '.join(repeated)}; give each once")
    inside = {str(parent) for plan in plans if ((parent := plan.output.parent) / REPORT_FILE).is_file()}
    if inside:
        raise UsageError(f"{', '.join(sorted(inside))} is a checkpoint itself; choose another --output to hold several")
