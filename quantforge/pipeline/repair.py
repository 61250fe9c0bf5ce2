"""Mend what can be mended in a checkpoint, into a new directory. Weights are copied, never changed."""

import copy
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantforge.errors import UsageError, VerifyError
from quantforge.model.shards import INDEX_FILE, SINGLE_FILE, TensorInfo, header_bytes, read_header, read_json
from quantforge.model.source import Checkpoint, resolve_model
from quantforge.pipeline.examine import Examination, Finding, examine
from quantforge.pipeline.examine.config import FIVE_ONLY_CLASS, OLDER_CLASS, SIDE_CONFIGS
from quantforge.pipeline.examine.files import WEIGHTS_SUFFIX, Files, read_files
from quantforge.pipeline.examine.findings import listed
from quantforge.pipeline.files import durable, sync_directory
from quantforge.pipeline.manifest import FILES_KEY, REPORT_FILE, file_hash
from quantforge.pipeline.writer import SIDE_DIRECTORIES, sync_tree, write_json

SAMPLING = ("temperature", "top_p", "top_k", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
SHOWN = 20


@dataclass(frozen=True)
class Repaired:
    """A repaired copy: where it is, what was done, and what is still to be said of it."""

    path: str
    repairs: tuple[str, ...]
    after: Examination

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "repairs": list(self.repairs), "after": self.after.to_json()}


class _Draft:
    """The copy in the making: JSON files to be written anew, tensors and files to leave out."""

    def __init__(self, files: Files, method: str | None, reference: Path | None) -> None:
        self.files = files
        self.method = method
        self.reference = reference
        self.objects = copy.deepcopy(files.objects)
        self.rewritten: set[str] = set()
        self.without: dict[str, set[str]] = defaultdict(set)  # file -> tensors left out
        self.left_out: set[str] = set()
        self.copied: dict[str, Path] = {}
        self.new_index = False

    @property
    def config(self) -> dict[str, Any]:
        return self.objects["config.json"]

    @property
    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config.setdefault("quantization_config", {})
        return found

    def rewrite(self, name: str) -> None:
        self.rewritten.add(name)

    def set_everywhere(self, key: str, value: object) -> None:
        """Change a setting in config.json and in the copies that older loaders read."""
        self.settings[key] = value
        self.rewrite("config.json")
        for name in SIDE_CONFIGS:
            if name in self.objects:
                self.objects[name][key] = value
                self.rewrite(name)


# ------------------------------------------------------------------------------------------------ what can be mended


def _version(draft: _Draft, found: list[Finding]) -> str:
    now = draft.settings.get("checkpoint_format") or draft.settings.get("format") or "gptq"
    other = "gptq" if now == "gptq_v2" else "gptq_v2"
    draft.set_everywhere("checkpoint_format", other)
    if "format" in draft.settings:
        draft.set_everywhere("format", other)
    return f"checkpoint_format {now} -> {other}, which the zeros of {len(found)} places show it to be"


def _order(draft: _Draft, found: list[Finding]) -> str:
    draft.set_everywhere("desc_act", True)
    return f"desc_act false -> true: {len(found)} sites have a g_idx of their own order"


def _quant_method(draft: _Draft, found: list[Finding]) -> str:
    draft.set_everywhere("quant_method", draft.method)
    return f"quant_method set to {draft.method}"


def _quant_place(draft: _Draft, found: list[Finding]) -> str:
    draft.config["quantization_config"] = draft.config["text_config"].pop("quantization_config")
    if not draft.config["text_config"]:
        del draft.config["text_config"]
    draft.rewrite("config.json")
    return "quantization_config moved from text_config to the top of config.json"


def _quant_config(draft: _Draft, found: list[Finding]) -> str | None:
    side = next((name for name in SIDE_CONFIGS if name in draft.objects), None)
    if side is None or isinstance(draft.config.get("quantization_config"), dict):
        return None
    draft.config["quantization_config"] = {**draft.objects[side], "quant_method": draft.method}
    draft.rewrite("config.json")
    return f"quantization_config copied from {side} into config.json"


def _side_config(draft: _Draft, found: list[Finding]) -> str:
    names = sorted({finding.where for finding in found})
    for name in names:
        if isinstance(draft.config.get("quantization_config"), dict):
            draft.objects[name] = draft.settings
            draft.rewrite(name)
        else:
            draft.left_out.add(name)
    return f"{listed(names)} made the same as quantization_config in config.json"


def _index(draft: _Draft, found: list[Finding]) -> str:
    draft.new_index = True
    return f"{INDEX_FILE} written anew from what the files hold ({len(found)} faults)"


def _drop_tensors(draft: _Draft, found: list[Finding]) -> str:
    for finding in found:
        key = finding.where
        holders = [name for name in draft.files.names if name.endswith(WEIGHTS_SUFFIX)]
        first = draft.files.checkpoint.tensors[key].file
        for name in holders if finding.code == "tensor-twice" else [first]:
            if (name != first or finding.code == "head-duplicate") and key in read_header(draft.files.path / name):
                draft.without[name].add(key)
    draft.new_index = True
    return f"{listed(finding.where for finding in found)} stored once"


def _leave_out(draft: _Draft, found: list[Finding]) -> str:
    draft.left_out |= {finding.where for finding in found}
    return f"{listed(finding.where for finding in found)} left out"


def _generation(draft: _Draft, found: list[Finding]) -> str | None:
    settings = draft.objects["generation_config.json"]
    sampling = [key for key in SAMPLING if key in settings]
    if settings.get("do_sample") is True or not sampling:
        return None
    for key in sampling:
        del settings[key]
    draft.rewrite("generation_config.json")
    return f"{', '.join(sampling)} taken out of generation_config.json: without do_sample they do nothing"


def _tokenizer_class(draft: _Draft, found: list[Finding]) -> str:
    draft.objects["tokenizer_config.json"]["tokenizer_class"] = OLDER_CLASS
    draft.rewrite("tokenizer_config.json")
    return f"tokenizer_class {FIVE_ONLY_CLASS} -> {OLDER_CLASS}"


def _chat_template(draft: _Draft, found: list[Finding]) -> str | None:
    if draft.reference is None:
        return None
    own = read_files(draft.reference)[0]
    template = own.objects.get("tokenizer_config.json", {}).get("chat_template")
    name = next((name for name in ("chat_template.jinja", "chat_template.json") if name in own.names), None)
    if name is not None:
        draft.copied[name] = draft.reference / name
    elif template:
        draft.objects["tokenizer_config.json"]["chat_template"] = template
        draft.rewrite("tokenizer_config.json")
    else:
        return None
    return f"chat template copied from {draft.reference}"


REPAIRS: dict[str, Callable[[_Draft, list[Finding]], str | None]] = {
    "quant-place": _quant_place,
    "quant-config": _quant_config,
    "quant-method": _quant_method,
    "version": _version,
    "order": _order,
    "side-config": _side_config,
    "added": _leave_out,
    "tensor-twice": _drop_tensors,
    "head-duplicate": _drop_tensors,
    "index": _index,
    "index-missing": _index,
    "index-stale": _index,
    "index-size": _index,
    "generation": _generation,
    "tokenizer-class": _tokenizer_class,
    "chat-template": _chat_template,
}
"""Code of a finding -> what is done about all findings of that code, in this order; None when nothing can be."""

UNDONE = ("changed", "two-sources", "model", "layers", "tensor-missing", "model-shape", "head-missing")
"""Errors that may come of another one, and go with it; they are looked for again in the copy."""


def repair(
    before: Examination, output: str | Path, reference: str | Path | None = None, *, trust_remote_code: bool = False
) -> Repaired:
    """Write a repaired copy of an examined checkpoint; it passes the same examination, or nothing is written.

    Raises:
        UsageError: the output exists.
        VerifyError: some error cannot be repaired; every one of them is named.
    """
    target = Path(output)
    if os.path.lexists(target):
        raise UsageError(f"--fix {target} exists; a repaired copy is written into a new directory")
    lasting = [finding for finding in before.errors if finding.code not in REPAIRS and finding.code not in UNDONE]
    _refuse(before.path, lasting)
    files, _ = read_files(resolve_model(before.path))
    draft = _Draft(files, before.quant_method, None if reference is None else resolve_model(reference))
    by_code: dict[str, list[Finding]] = defaultdict(list)
    for finding in before.findings:
        by_code[finding.code].append(finding)
    repairs = [said for code, mend in REPAIRS.items() if by_code[code] and (said := mend(draft, by_code[code]))]
    if not repairs:
        _refuse(before.path, list(before.errors))
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True)
    try:
        _write(draft, partial, {finding.where for finding in by_code["changed"]})
        after = examine(partial, reference, trust_remote_code=trust_remote_code)
        _refuse(before.path, list(after.errors))
        sync_tree(partial)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(target.resolve().parent)
    return Repaired(str(target), tuple(dict.fromkeys(repairs)), replace(after, path=str(target)))


def _refuse(path: str, lasting: list[Finding]) -> None:
    if lasting:
        more = [f"... and {len(lasting) - SHOWN} more"] if len(lasting) > SHOWN else []
        lines = [f"{finding.where}: {finding.text}" for finding in lasting[:SHOWN]]
        raise VerifyError([f"{path}: {len(lasting)} errors cannot be repaired, nothing was written:", *lines, *more])


# ------------------------------------------------------------------------------------------------ the copy


def _write(draft: _Draft, target: Path, changed: set[str]) -> None:
    """Write the copy; `changed` are the files that were not what the manifest says before the repair already."""
    source = draft.files.path
    names = [name for name in draft.files.names if name not in draft.left_out and not name.startswith(".")]
    if draft.new_index and SINGLE_FILE not in names:
        draft.objects[INDEX_FILE] = _new_index(draft, names)
        draft.rewrite(INDEX_FILE)
    for name in names:
        if draft.without[name]:
            _copy_weights(draft, name, target / name)
        elif name not in draft.rewritten and name != REPORT_FILE:
            _copy(source / name, target / name)
    for name, file in draft.copied.items():
        _copy(file, target / name)
    for folder in SIDE_DIRECTORIES:
        if (source / folder).is_dir() and not (source / folder).is_symlink():
            (target / folder).mkdir()
            for file in sorted(file for file in (source / folder).iterdir() if file.is_file()):
                _copy(file, target / folder / file.name)
    for name in draft.rewritten:
        write_json(target / name, draft.objects[name])
    if REPORT_FILE in draft.objects:
        _write_report(draft, target, changed)


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as original, durable(target) as handle:
        shutil.copyfileobj(original, handle)


def _copy_weights(draft: _Draft, name: str, target: Path) -> None:
    """A weight file without some of its tensors."""
    kept = _kept(draft, name)
    part = Checkpoint(draft.files.path, {}, kept)
    with durable(target) as handle:
        handle.write(header_bytes(kept))
        for key in kept:
            part.copy_bytes(key, handle)


def _kept(draft: _Draft, name: str) -> dict[str, TensorInfo]:
    found = read_header(draft.files.path / name)
    return {key: info for key, info in found.items() if key not in draft.without[name]}


def _new_index(draft: _Draft, names: list[str]) -> dict[str, Any]:
    weights = {name: _kept(draft, name) for name in names if name.endswith(WEIGHTS_SUFFIX)}
    old = read_json(draft.files.path / INDEX_FILE) if draft.files.index is not None else {}
    metadata = old.get("metadata")
    total = sum(info.total_bytes for infos in weights.values() for info in infos.values())
    return {
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": total},
        "weight_map": {key: name for name, infos in weights.items() for key in infos},
    }


def _write_report(draft: _Draft, target: Path, changed: set[str]) -> None:
    """The report, with the hashes of the files that the repair, and nobody before it, has changed."""
    report = draft.objects[REPORT_FILE]
    hashes = report.get(FILES_KEY)
    if isinstance(hashes, dict):
        mended = draft.rewritten | draft.copied.keys() | {name for name, keys in draft.without.items() if keys}
        for name in sorted(mended - changed):
            hashes[name] = file_hash(target / name)
        for name in draft.left_out:
            hashes.pop(name, None)
    write_json(target / REPORT_FILE, report)
