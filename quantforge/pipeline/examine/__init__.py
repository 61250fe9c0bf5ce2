"""Examine any checkpoint directory, ours or another tool's: everything that is wrong with it, at once.

Nothing here writes; `repair` mends what can be mended into another directory.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from quantforge.contracts import Subject, Verdict, contract_names, load_contract
from quantforge.errors import SourceError, UsageError
from quantforge.model.gguf_file import GgufCheckpoint, is_gguf_file
from quantforge.model.packed import quantization_config
from quantforge.model.source import Checkpoint, open_checkpoint, resolve_model
from quantforge.pipeline.examine.config import Quantization, check_side_configs, check_side_files, find_quantization
from quantforge.pipeline.examine.files import Files, check_manifest, read_files
from quantforge.pipeline.examine.findings import Examination, Finding, error
from quantforge.pipeline.examine.gguf import check_values, open_gguf_of, require_alone
from quantforge.pipeline.examine.model import check_model, seen_as_float
from quantforge.pipeline.examine.reference import Comparison
from quantforge.pipeline.examine.sites import Site, check_cache, check_floats, check_fused, check_version, read_sites
from quantforge.pipeline.subject import checkpoint_subject, float_subject, gguf_subject
from quantforge.readers import DecodedWeight, Scheme

__all__ = ["Examination", "Finding", "examine"]


def examine(
    model: str | Path,
    reference: str | Path | None = None,
    *,
    tensor_parallel: int = 1,
    trust_remote_code: bool = False,
) -> Examination:
    """Read everything in a checkpoint directory and tell what is wrong.

    Args:
        model: a directory, a hub id, or a GGUF file beside its config.json.
        reference: the float model it was made from; kept tensors must equal its own byte for byte, and each site's
            distance from the original weight is measured.
        tensor_parallel: over how many devices servers would split it.

    Raises:
        SourceError: there is no directory, or the reference cannot be read. What is wrong inside is a finding.
        UsageError: the reference is quantized itself, or the checkpoint is GGUF and cannot be compared with it, or a
            GGUF file beside weights of another kind.
    """
    file = Path(model) if is_gguf_file(Path(model)) else None
    if file is not None:
        require_alone(file)
    path = resolve_model(model if file is None else file.parent)
    if several := _checkpoints_in(path):
        text = f"the directory holds several checkpoints; verify each of {', '.join(several)}"
        return Examination(str(model), None, 0, 0, (error("several", str(path), text),))
    comparison = None if reference is None else Comparison(_open_reference(reference))
    files, findings = read_files(path, None if file is None else file.name)
    changed, notes = check_manifest(files)
    if (gguf := open_gguf_of(path, file, findings)) is not None:
        findings += check_values(gguf)
        if comparison is not None:
            raise UsageError(f"{path} is GGUF, which --reference is not compared with; verify it without")
    quantization, unsettled = find_quantization(files)
    findings += [*changed, *unsettled, *check_side_configs(files, quantization.settings), *check_side_files(files)]
    sites, faults = read_sites(files, quantization, _nothing if comparison is None else comparison.site)
    scales, faulty = check_cache(files, quantization)
    packed = {key for parts in quantization.sites.values() for key in parts.values()} | scales
    findings += faulty
    findings += [*faults, *check_floats(files.checkpoint, packed), *check_fused(files.checkpoint, sites)]
    versions, more = check_version(quantization, sites)
    notes += more
    findings += versions
    if comparison is not None:
        findings += comparison.rest(files, packed, set(quantization.sites))
    if files.checkpoint.config and files.whole and files.checkpoint.tensors:
        findings += check_model(files, quantization, sites, trust_remote_code=trust_remote_code)
    else:
        why = "it is GGUF" if gguf is not None else "files are missing or unreadable"
        notes.append(f"not compared with the model that config.json describes, because {why}")
    return Examination(
        path=str(model),
        quant_method=quantization.method if gguf is None else "gguf",
        tensors=len(files.checkpoint.tensors if gguf is None else gguf.tensors),
        sites=len(sites),
        findings=tuple(dict.fromkeys(findings)),
        notes=tuple(notes),
        errors_by_site={} if comparison is None else comparison.errors,
        verdicts=_verdicts(_subject(files, quantization, sites, gguf, tensor_parallel)),
    )


def _open_reference(reference: str | Path) -> Checkpoint:
    checkpoint = open_checkpoint(reference)
    if quantization_config(checkpoint) is not None:
        raise UsageError(
            f"--reference {reference} is quantized itself; give the float model that this one was made from"
        )
    return checkpoint


def _nothing(name: str, scheme: Scheme, decoded: DecodedWeight) -> Iterator[Finding]:
    return iter(())


def _checkpoints_in(path: Path) -> list[str]:
    """Of a run with several formats or variants, which writes a directory of directories."""
    if os.path.lexists(path / "config.json"):
        return []
    return sorted(folder.name for folder in path.iterdir() if os.path.isfile(folder / "config.json"))


def _verdicts(subject: Subject | None) -> tuple[Verdict, ...]:
    """What each server does with it; nothing when it could not be read to the end."""
    return () if subject is None else tuple(load_contract(name).check(subject) for name in contract_names())


def _subject(
    files: Files, quantization: Quantization, sites: dict[str, Site], gguf: GgufCheckpoint | None, tensor_parallel: int
) -> Subject | None:
    if not files.whole or not files.checkpoint.config or not (files.checkpoint.tensors or gguf):
        return None
    try:
        if gguf is not None:
            return gguf_subject(gguf, tensor_parallel)
        if quantization.method is None:
            return float_subject(files.checkpoint, tensor_parallel)
        if quantization.reader is None or not sites or len(sites) < len(quantization.sites):
            return None
        return checkpoint_subject(seen_as_float(files, quantization, sites), tensor_parallel)
    except SourceError:
        return None  # what could not be read is among the findings
