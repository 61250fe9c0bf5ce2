"""Convert a quantized checkpoint into another format, exactly: codes, scales and zeros are carried over as they are.

What the other format cannot hold is refused, with every reason at once. The result is read back before it is published.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantforge import __version__
from quantforge.errors import PlanError, UsageError, WorkspaceError
from quantforge.formats import NAMED_SITES, Format, format_names, load_format
from quantforge.model.gguf_sites import GgufSites
from quantforge.model.packed import PackedCheckpoint, PackedSource, open_any, quantization_config
from quantforge.pipeline.bundle import bundle_kernels, bundle_problems
from quantforge.pipeline.carried import Carried, Progress, Survey
from quantforge.pipeline.files import disk_errors
from quantforge.pipeline.gguf_source import is_gguf, open_gguf_sites
from quantforge.pipeline.manifest import FILES_KEY, REPORT_FILE, file_hashes
from quantforge.pipeline.verify import verify_checkpoint
from quantforge.pipeline.workspace import Workspace, work_directory
from quantforge.pipeline.writer import publish, write_checkpoint, write_json
from quantforge.sizes import parse_size
from quantforge.spec import label_of

DEFAULT_SHARD = "5GB"


@dataclass(frozen=True)
class Conversion:
    """What was done; attributes are what `convert` prints.

    Attributes:
        source_format: the ``quant_method`` of the source.
        spec_label: the grids in words.
        sites: count of quantized matrices.
        tensors: count of tensors that were compared with the source's after writing.
        notes: what deserves to be said; warnings begin with ``warning:``.
    """

    source: str
    output: str
    source_format: str
    format: str
    spec_label: str
    scale_dtype: str
    sites: int
    tensors: int
    total_bytes: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def convert_checkpoint(
    checkpoint: str | Path,
    format: str,
    output: str | Path | None = None,
    *,
    config: str | Path | None = None,
    max_shard_size: str | int = DEFAULT_SHARD,
    targets: Sequence[str] = (),
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Conversion:
    """Write a quantized checkpoint in another format with exactly the same weights, and verify it.

    Args:
        checkpoint: any that `quantforge.readers` can read, ours or another tool's, or a GGUF file or its directory.
        format: the name of a format.
        output: a directory that does not exist yet; ``<checkpoint>-<format>`` here when None.
        config: of a GGUF file, the directory with its config.json and tokenizer, where that is not its own.
        max_shard_size: largest file.
        targets: GPUs to compile kernels for, which are put beside the weights.
        progress: called with (what, done, total).

    Raises:
        UsageError: no such format, an impossible size.
        SourceError: the checkpoint cannot be read.
        PlanError: it is not quantized, or the format cannot hold it exactly; every reason with its numbers.
        WorkspaceError: the output exists, or the disk refuses.
        VerifyError: the result does not read back. In all cases nothing is left behind.
    """
    chosen, shard_bytes = load_format(format), parse_size(max_shard_size)
    target = Path(output or f"{Path(checkpoint).resolve().name.removesuffix('.gguf')}-{format}")
    if os.path.lexists(target):
        raise WorkspaceError(f"{target} already exists; choose another --output or remove it")
    if problems := list(bundle_problems(targets, [chosen])):
        raise PlanError(problems)
    packed = _open(Path(checkpoint), None if config is None else Path(config), allow_pickle, progress)
    contents = Carried(packed, trust_remote_code=trust_remote_code, progress=progress)
    _require(chosen, contents, lambda other: _problems_of_headers(other, contents))
    survey = contents.survey()
    _require(chosen, contents, lambda other: _problems_of_headers(other, contents) + _problems_of_values(other, survey))
    contents.settle(survey, chosen.scale_dtype)
    work = work_directory(target)
    asked = {"quantforge": __version__, "convert": str(_origin(contents).resolve()), "format": format}
    with disk_errors(work, kept=False), Workspace.open(work, asked) as workspace:
        try:
            staged = workspace.fresh_output()
            conversion = _write(staged, target, contents, chosen, survey, shard_bytes, targets)
            publish(staged, target)
        finally:
            workspace.discard()
    return conversion


def _open(checkpoint: Path, config: Path | None, allow_pickle: bool, progress: Progress) -> PackedSource:
    if is_gguf(checkpoint):
        return open_gguf_sites(checkpoint, config, progress)
    if config is not None:
        raise UsageError(f"--config is for GGUF files; {checkpoint} is none and has its own config.json")
    packed = open_any(checkpoint, allow_pickle=allow_pickle)
    if not isinstance(packed, PackedCheckpoint):
        raise PlanError([f"{packed.path} is not quantized, so there is nothing to convert; see quantforge quantize"])
    return packed


def _origin(contents: Carried) -> Path:
    """The directory or the GGUF file that holds the weights."""
    return contents.source.file.file if isinstance(contents.source, GgufSites) else contents.source.path


def _require(chosen: Format, contents: Carried, problems_of: Callable[[Format], list[str]]) -> None:
    """PlanError with every problem, and the formats that have none."""
    problems = problems_of(chosen)
    if not problems:
        return
    others = [name for name in format_names() if not problems_of(load_format(name))]
    advice = [f"no such problem with --format {', '.join(others)}"] if others else []
    raise PlanError([f"{_origin(contents)} cannot be converted to {chosen.name} exactly:", *problems, *advice])


def _problems_of_headers(chosen: Format, contents: Carried) -> list[str]:
    """What config and headers tell, before any weight is read."""
    problems = list(contents.beyond)
    if contents.activations is not None and not chosen.activations:
        problems.append(
            f"{chosen.name} cannot say that inputs are quantized, and those of {len(contents.shapes)} sites are "
            f"({contents.activations.label()}); the model would become another"
        )
    if contents.kv_cache is not None and chosen.encode_cache is None:
        problems.append(
            f"{chosen.name} cannot hold scales of a cache, and {len(contents.cache_scales)} modules have them "
            f"({contents.kv_cache.label()})"
        )
    if len(contents.specs) == len(contents.shapes):
        problems += chosen.problems(contents.specs, list(contents.shapes.values()))
    if chosen.container is not None:
        left_out = {*contents.packed, *contents.unused}
        problems += chosen.container.problems(contents.source, list(contents.shapes), left_out)
    return problems


def _problems_of_values(chosen: Format, survey: Survey) -> list[str]:
    """What only the tensors tell."""
    problems = []
    if survey.act_order and not chosen.group_index:
        problems.append(
            f"{chosen.name} has no tensor for the group of each input, and inputs of {len(survey.act_order)} sites are "
            f"in an order of their own (act-order, g_idx): {_some(survey.act_order)}"
        )
    if survey.short and not chosen.group_index:
        problems.append(
            f"{chosen.name} needs a group size that divides the inputs, and the last group is short at "
            f"{len(survey.short)} sites: {_some(survey.short)}"
        )
    if chosen.scale_dtype is not None and (inexact := survey.inexact[chosen.scale_dtype]):
        problems.append(
            f"{chosen.name} stores scales in {chosen.scale_dtype}, which cannot hold {sum(inexact.values())} of "
            f"{survey.scales} scales exactly, at {len(inexact)} sites: "
            f"{_counted(inexact)}"
        )
    if chosen.minima and survey.minima:
        problems.append(
            f"{chosen.name} stores minima, -zero * scale, in float16, which cannot hold {sum(survey.minima.values())} "
            f"of {survey.scales} exactly, at {len(survey.minima)} sites: {_counted(survey.minima)}"
        )
    return problems


def _counted(sites: Mapping[str, int]) -> str:
    return _some([f"{name} ({count})" for name, count in sites.items()])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_SITES} more" if len(names) > NAMED_SITES else ""
    return ", ".join(names[:NAMED_SITES]) + more


def _write(
    staged: Path,
    target: Path,
    contents: Carried,
    chosen: Format,
    survey: Survey,
    shard_bytes: int,
    targets: Sequence[str],
) -> Conversion:
    """Write and verify; `target` is the name it will have."""
    facts = contents.facts(survey)
    skipped = write_checkpoint(staged, contents, chosen, facts, shard_bytes, target.name)
    if targets:
        bundle_kernels(staged, contents, targets)
    source_format = str((quantization_config(contents.source) or {}).get("quant_method", "gguf"))
    report = _report(contents, source_format, chosen.name)
    write_json(staged / REPORT_FILE, {**report, FILES_KEY: file_hashes(staged)})
    tensors = verify_checkpoint(staged, contents)
    notes = list(contents.notes)
    if skipped:
        notes.append(f"not copied from the source: {', '.join(skipped)}")
    return Conversion(
        source=str(_origin(contents)),
        output=str(target),
        source_format=source_format,
        format=chosen.name,
        spec_label=label_of(contents.specs.values(), contents.activations),
        scale_dtype=next(iter(contents.specs.values())).scale_dtype,
        sites=len(contents.shapes),
        tensors=tensors,
        total_bytes=sum(file.stat().st_size for file in staged.rglob("*") if file.is_file()),
        notes=tuple(notes),
    )


def _report(contents: Carried, source_format: str, format: str) -> dict[str, Any]:
    """The report of the run that made the source, if it has one, and that this is a conversion.

    Without the run's fingerprint: the output is no longer that run's own.
    """
    try:
        origin = _origin(contents)
        directory = origin.parent if origin.is_file() else origin
        known = json.loads((directory / REPORT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    known = {key: value for key, value in known.items() if key != "fingerprint"} if isinstance(known, dict) else {}
    return {**known, "converted": {"quantforge": __version__, "from": source_format, "to": format}}
