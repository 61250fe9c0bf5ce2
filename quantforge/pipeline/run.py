"""The run: calibrate, solve and commit one decoder layer after another, then write, verify and publish."""

import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantforge import __version__
from quantforge.calibration import CalibrationSet
from quantforge.errors import QuantforgeError, WorkspaceError
from quantforge.formats import load_format
from quantforge.model.gguf_file import gguf_files, open_gguf
from quantforge.model.skeleton import transformers_version
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import TOKENS_PER_BATCH
from quantforge.pipeline.allocate import allocate_plan, with_bits
from quantforge.pipeline.bundle import bundle_kernels
from quantforge.pipeline.calibrate import calibrate, keep_sampled
from quantforge.pipeline.files import disk_errors
from quantforge.pipeline.influence import gather_weights
from quantforge.pipeline.job import Job, Solved
from quantforge.pipeline.layers import solve_layers
from quantforge.pipeline.manifest import FILES_KEY, REPORT_FILE, file_hashes
from quantforge.pipeline.plan import Plan
from quantforge.pipeline.subject import facts_of
from quantforge.pipeline.tune import tune
from quantforge.pipeline.verify import verify_checkpoint
from quantforge.pipeline.workspace import Workspace, discard, owned, work_directory
from quantforge.pipeline.writer import publish, write_checkpoint, write_json
from quantforge.recipe import Recipe
from quantforge.report import (
    Allocated,
    Allocation,
    Assembling,
    Event,
    LayerReport,
    OutputReport,
    RunFinished,
    RunReport,
    RunStarted,
    TuneReport,
    Verifying,
)

FALLBACK_LIMIT = 0.5


def quantize(recipe: Recipe, plan: Plan) -> Iterator[Event]:
    """Carry out a plan. The last event is RunFinished; by then the output is verified and under its final name.

    Interrupted at any moment, the same call continues from the last committed layer and gives the same bytes. Raises
    QuantforgeError subclasses; nothing is published unless everything succeeded.
    """
    work = work_directory(plan.output)
    with disk_errors(work):
        refuse_foreign_output(plan)
        calibration = yield from calibrate(recipe, plan, [work])
        fingerprint = fingerprint_of(recipe, plan, calibration)
        if os.path.lexists(plan.output):
            yield from already_published(recipe, plan, fingerprint)
            return
        with open_job(recipe, plan, calibration, fingerprint) as opened:
            job = yield from begin(opened)
            of_tokens = yield from gather_weights([job])
            yield from solve_layers(job, of_tokens)
            yield from finish(job)


# ------------------------------------------------------------------------------------------------ stages of one output


def refuse_foreign_output(plan: Plan) -> None:
    """Raises WorkspaceError when something that no run has made is in the output's place."""
    if os.path.lexists(plan.output) and not (plan.output / REPORT_FILE).is_file():
        raise _exists(plan)


@contextmanager
def open_job(
    recipe: Recipe, plan: Plan, calibration: CalibrationSet | None, fingerprint: Mapping[str, Any]
) -> Iterator[Job]:
    """The job, its work directory open and locked, the tokens of the model's own in it."""
    _refuse_if_strict(recipe, plan.warnings + (calibration.warnings if calibration is not None else ()))
    files = {"files": plan.checkpoint.file_times()}
    with Workspace.open(work_directory(plan.output), {**fingerprint, **files}) as workspace:
        job = Job(recipe, plan, workspace, calibration, fingerprint)
        keep_sampled(job)
        yield job


def begin(job: Job) -> Generator[Event, None, Job]:
    """The job with its bits settled. Damaged remains of an earlier run are found here. Ends in RunStarted."""
    recipe, plan, workspace = job.recipe, job.plan, job.workspace
    if recipe.budget is not None:
        assert job.calibration is not None
        allocation = yield from _allocate(recipe, plan, workspace, job.calibration)
        job = replace(job, plan=with_bits(plan, allocation), allocation=allocation)
    done = workspace.done()
    workspace.reports()  # a damaged one is found before more work is done, not after
    yield RunStarted(plan.layers, done, job.calibration.notes if job.calibration is not None else ())
    return job


def finish(job: Job) -> Generator[Event, None, None]:
    """Tune, write, verify and publish an output whose layers are all committed. Ends in RunFinished."""
    recipe, plan, workspace = job.recipe, job.plan, job.workspace
    tuning: TuneReport | None = None
    if recipe.tune_epochs:
        assert job.calibration is not None
        trusted = recipe.trust_remote_code
        tuning = yield from tune(plan, workspace, job.calibration, recipe.tune_epochs, trust_remote_code=trusted)
    report = replace(_report(plan, workspace, job.calibration), tuning=tuning)
    if job.allocation is not None:
        report = replace(report, allocation=job.allocation, warnings=job.allocation.warnings + report.warnings)
    _refuse_if_strict(recipe, report.warnings)
    staged = workspace.fresh_output()
    contents = Solved(plan, workspace)
    outputs: list[OutputReport] = []
    for name in plan.formats:
        directory = staged if len(plan.formats) == 1 else staged / name
        directory.mkdir(exist_ok=True)
        yield Assembling(name)
        report = _write(directory, name, job, contents, report)
        yield Verifying(name)
        verify_checkpoint(directory, contents)
        outputs.append(_output_report(plan, name, directory))
    if len(plan.formats) > 1:
        write_json(staged / REPORT_FILE, {"fingerprint": job.fingerprint})
    publish(staged, plan.output)
    workspace.discard()
    yield RunFinished(replace(report, outputs=tuple(outputs)))


def _allocate(
    recipe: Recipe, plan: Plan, workspace: Workspace, calibration: CalibrationSet
) -> Generator[Event, None, Allocation]:
    """The bits that an earlier run chose, or a new choice, which is kept."""
    allocation = workspace.allocation()
    if allocation is None:
        with workspace.scratch() as directory:
            allocation = yield from allocate_plan(recipe, plan, calibration, directory)
        workspace.keep_allocation(allocation)
    yield Allocated(allocation)
    return allocation


# ------------------------------------------------------------------------------------------------ before and after


def fingerprint_of(recipe: Recipe, plan: Plan, calibration: CalibrationSet | None) -> dict[str, Any]:
    """Everything the output's bytes depend on."""
    return {
        "quantforge": __version__,
        "torch": torch.__version__,
        "transformers": transformers_version(),
        "threads": torch.get_num_threads(),
        "tokens_per_batch": TOKENS_PER_BATCH,
        "device": str(plan.streamed.device),
        "model": plan.checkpoint.fingerprint(),
        "method": plan.method,
        "options": plan.options,
        "bits": plan.spec.bits,
        "group_size": plan.spec.group_size,
        "symmetric": plan.spec.symmetric,
        "scale_dtype": plan.spec.scale_dtype,
        "rules": [rule.label() for rule in recipe.rules],
        "specs": {name: spec.label() for name, spec in plan.specs.items() if spec != plan.spec},
        "budget": recipe.budget_label,
        "candidate_bits": sorted({bits for unit in plan.units for bits in unit.bits}),
        "activation_bits": None if plan.activations is None else plan.activations.bits,
        "kv_cache": recipe.kv_cache,
        "token_weights": recipe.token_weights if plan.needs_gram else "none",
        "sequential": recipe.sequential,
        "tune_epochs": recipe.tune_epochs,
        "formats": list(plan.formats),
        "bundle_kernels": list(recipe.bundle_kernels),
        "max_shard_bytes": recipe.max_shard_bytes,
        "ignore": list(recipe.ignore),
        "calibration": None if calibration is None else calibration.fingerprint,
    }


def _exists(plan: Plan) -> WorkspaceError:
    return WorkspaceError(f"{plan.output} already exists; choose another --output or remove it")


def already_published(recipe: Recipe, plan: Plan, fingerprint: Mapping[str, Any]) -> Generator[Event, None, None]:
    """The output exists: finished by this very job (then there is nothing to do), or an error."""
    work = work_directory(plan.output)
    file = plan.output / REPORT_FILE
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        if known["fingerprint"] != json.loads(json.dumps(fingerprint)):
            raise ValueError("another run's")
        first = json.loads((plan.output_of(plan.formats[0]) / REPORT_FILE).read_text(encoding="utf-8"))
        reports = tuple(LayerReport.from_json(layer) for layer in first["layers"])
        stored = _run_report(plan, reports, None)
        allocation = first["allocation"]
        report = replace(
            stored,
            spec_label=first["spec_label"],
            warnings=tuple(first["warnings"]),
            calibration=first["calibration"],
            allocation=None if allocation is None else Allocation.from_json(allocation),
            tuning=None if first["tuning"] is None else TuneReport(**first["tuning"]),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:  # no report, a damaged one, another run's
        raise _exists(plan) from error
    _refuse_if_strict(recipe, report.warnings)
    outputs = tuple(_output_report(plan, name, plan.output_of(name)) for name in plan.formats)
    if owned(work):
        discard(work)  # killed after publishing, before cleaning up
    yield RunStarted(plan.layers, plan.layers, (f"{plan.output} is already complete; nothing to do",))
    yield RunFinished(replace(report, outputs=outputs))


def _output_report(plan: Plan, name: str, directory: Path) -> OutputReport:
    """A finished output, which may still lie in the work directory."""
    files = open_gguf(directory) if gguf_files(directory) else open_checkpoint(directory)
    total_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return OutputReport(name, str(plan.output_of(name)), total_bytes, files.total_bytes, len(files.tensors))


def _run_report(
    plan: Plan,
    layers: tuple[LayerReport, ...],
    calibration: CalibrationSet | None,
) -> RunReport:
    warnings = plan.warnings + tuple(warning for layer in layers for warning in layer.warnings)
    if calibration is not None:
        warnings = calibration.warnings + warnings
    return RunReport(
        method=plan.method,
        spec_label=plan.label,
        layers=layers,
        outputs=(),
        kept=plan.kept,
        warnings=warnings,
        source_bytes=plan.source_bytes,
        calibration={} if calibration is None else calibration.to_json(),
    )


def _report(plan: Plan, workspace: Workspace, calibration: CalibrationSet | None) -> RunReport:
    report = _run_report(plan, tuple(workspace.reports()), calibration)
    sites = [site for layer in report.layers for site in layer.sites]
    if len(report.fallbacks) > FALLBACK_LIMIT * len(sites):
        raise QuantforgeError(
            f"{plan.method} was asked for, but {len(report.fallbacks)} of {len(sites)} sites fell back to rtn. "
            f"First: {report.fallbacks[0].name}: {report.fallbacks[0].fallback}. Nothing was published."
        )
    return report


def _refuse_if_strict(recipe: Recipe, warnings: Sequence[str]) -> None:
    if recipe.strict and warnings:
        lines = "\n".join(f"  {warning}" for warning in warnings[:20])
        raise QuantforgeError(f"--strict: {len(warnings)} warnings, nothing was published\n{lines}")


def _write(directory: Path, name: str, job: Job, contents: Solved, report: RunReport) -> RunReport:
    """Write one export with its report; returns the report, with what was left behind in its notes."""
    recipe, plan = job.recipe, job.plan
    zeros = any(site.has_zero_zero for layer in report.layers for site in layer.sites)
    facts = facts_of(plan, has_zero_zero=zeros)
    file_name = plan.output.name or "model"
    skipped = write_checkpoint(directory, contents, load_format(name), facts, recipe.max_shard_bytes, file_name)
    if skipped:
        report = replace(report, notes=(f"not copied from the source: {', '.join(skipped)}",))
    if recipe.bundle_kernels:
        bundle_kernels(directory, contents, recipe.bundle_kernels)
    settings = recipe.model_dump(mode="json", exclude={"model", "output"} | ({"bits"} if recipe.budget else set()))
    content = {"quantforge": __version__, "fingerprint": job.fingerprint, "recipe": settings} | report.to_json()
    content.pop("outputs")
    content[FILES_KEY] = file_hashes(directory)
    write_json(directory / REPORT_FILE, content)
    return report
