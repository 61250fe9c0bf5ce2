"""The files of a checkpoint directory: what is there, what can be read, and what an index and a manifest say of it.

Everything that can be read is, whatever else is damaged, so that all faults are found at once.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.errors import SourceError
from quantforge.model.pickles import PICKLE_SUFFIXES
from quantforge.model.shards import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorInfo,
    file_names,
    hostile_names,
    leaves,
    read_header,
    read_json,
    read_weight_map,
)
from quantforge.model.source import Checkpoint, read_config
from quantforge.pipeline.examine.findings import Finding, error, listed, refused, same_bytes, warning
from quantforge.pipeline.manifest import FILES_KEY, REPORT_FILE, file_hash

WEIGHTS_SUFFIX = ".safetensors"
JSON_FILES = (
    "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "quantize_config.json", "quantization_config.json", "preprocessor_config.json", "chat_template.json", REPORT_FILE,
)  # fmt: skip
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Files:
    """What could be read of a directory.

    Attributes:
        names: the files in it, sorted; links that lead out of it are left out.
        objects: the JSON files that hold objects, by name, config.json included.
        checkpoint: the tensors of all weight files that could be read; its config is empty when there is none.
        index: tensor -> file, as the index has it; None without a usable one.
        whole: no weight file is missing or unreadable.
    """

    names: tuple[str, ...]
    objects: dict[str, dict[str, Any]]
    checkpoint: Checkpoint
    index: dict[str, str] | None
    whole: bool

    @property
    def path(self) -> Path:
        return self.checkpoint.path


def read_files(path: Path, gguf: str | None = None) -> tuple[Files, list[Finding]]:
    """Read names, JSON files and headers of a directory; no tensor is read. SourceError when it cannot be listed.

    `gguf` names the one of its GGUF files that is meant; the others are left alone.
    """
    findings: list[Finding] = []
    outside = sorted(entry.name for entry in path.iterdir() if entry.is_symlink() and leaves(entry))
    findings += [
        error(
            "link", name, f"{name} is a link that leads out of the directory; it is not read. Put the file itself there"
        )
        for name in outside
    ]
    others = () if gguf is None else (name for name in file_names(path) if name.endswith(".gguf") and name != gguf)
    names = tuple(name for name in file_names(path) if name not in {*outside, *others})
    objects = _read_objects(path, names, findings)
    index = _read_index(path, names, findings)
    weights = _weight_files(names, index, findings)
    tensors, readable = _read_headers(path, weights, findings)
    named = set(index.values()) if index is not None and SINGLE_FILE not in names else set()
    whole = readable == set(weights) and named <= readable and not any(f.code == "shard-missing" for f in findings)
    checkpoint = Checkpoint(path, objects.get("config.json", {}), tensors)
    files = Files(names, objects, checkpoint, index, whole)
    if index is not None and SINGLE_FILE not in names:
        findings += _stale(index, tensors, readable)
        findings += _wrong_size(files)
    return files, findings


def _read_objects(path: Path, names: tuple[str, ...], findings: list[Finding]) -> dict[str, dict[str, Any]]:
    objects = {}
    for name in ("config.json", *(name for name in JSON_FILES if name in names)):
        try:
            objects[name] = read_config(path) if name == "config.json" else read_json(path / name)
        except SourceError as fault:
            findings.append(refused(fault, name))
    return objects


def _read_index(path: Path, names: tuple[str, ...], findings: list[Finding]) -> dict[str, str] | None:
    if INDEX_FILE not in names:
        return None
    try:
        return read_weight_map(path / INDEX_FILE)
    except SourceError as fault:
        findings.append(refused(fault, INDEX_FILE))
        return None


def _weight_files(names: tuple[str, ...], index: dict[str, str] | None, findings: list[Finding]) -> list[str]:
    """The files whose tensors count: one file, those of the index, or without one all that are there."""
    present = [name for name in names if name.endswith(WEIGHTS_SUFFIX)]
    if SINGLE_FILE in names:
        others = [name for name in present if name != SINGLE_FILE]
        if INDEX_FILE in names:
            text = (
                f"{SINGLE_FILE} and {INDEX_FILE} are both there: transformers reads the one, servers the other's files"
            )
            findings.append(error("two-sources", SINGLE_FILE, f"{text}; remove what is not meant"))
        findings += [warning("unread-file", name, f"{name} is not read beside {SINGLE_FILE}") for name in others]
        return [SINGLE_FILE]
    if index is not None:
        named = sorted(set(index.values()))
        hostile = hostile_names(named)
        findings += [
            error("index-path", name[:200], f"the index names {name[:200]!r}, no file beside it") for name in hostile
        ]
        plain = [name for name in named if name not in hostile]
        findings += [
            error("shard-missing", name, f"{name} is in the index and not in the directory; download it again")
            for name in plain
            if name not in names
        ]
        spare = [name for name in present if name not in named]
        findings += [warning("unread-file", name, f"{name} is in the directory and not in the index") for name in spare]
        return [name for name in plain if name in names]
    if not present:
        if not any(name.endswith(".gguf") for name in names):
            findings.append(_no_weights(names))
        return []
    if INDEX_FILE not in names:
        text = f"{len(present)} weight files and no {INDEX_FILE}, without which none of them is found"
        findings.append(error("index-missing", INDEX_FILE, f"{text}; --fix writes one"))
    findings += list(_unnumbered(present))
    return present


def _no_weights(names: tuple[str, ...]) -> Finding:
    if others := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        text = f"the directory holds pickles ({listed(others)}), which can run code; convert them to safetensors"
        return error("no-weights", SINGLE_FILE, text)
    return error("no-weights", SINGLE_FILE, "the directory holds no weights")


def _unnumbered(present: list[str]) -> Iterator[Finding]:
    """Shards that must exist by the numbers in the names of the others."""
    for match in filter(None, map(_NUMBERED.fullmatch, present)):
        count = int(match[3])
        wanted = [f"{match[1]}-{number:05d}-of-{match[3]}.safetensors" for number in range(1, count + 1)]
        for name in wanted:
            if name not in present:
                yield error("shard-missing", name, f"{name} is missing: the others are numbered up to {count}")
        return


def _read_headers(path: Path, weights: list[str], findings: list[Finding]) -> tuple[dict[str, TensorInfo], set[str]]:
    """The tensors of all readable files, the first of each name, and which files are readable."""
    tensors: dict[str, TensorInfo] = {}
    readable = set()
    for name in weights:
        try:
            found = read_header(path / name)
        except SourceError as fault:
            findings.append(refused(fault, name))
            continue
        readable.add(name)
        for key in sorted(found.keys() & tensors.keys()):
            findings.append(_twice(path, key, tensors[key], found[key]))
        tensors |= {key: info for key, info in found.items() if key not in tensors}
    if weights and readable and not tensors:
        findings.append(error("no-weights", weights[0], f"{listed(weights)} hold no tensor"))
    return tensors, readable


def _twice(path: Path, key: str, first: TensorInfo, second: TensorInfo) -> Finding:
    says = f"{key} is in both {first.file} and {second.file}"
    one, other = (Checkpoint(path, {}, {key: info}).read(key) for info in (first, second))
    if same_bytes(one, other):
        return error("tensor-twice", key, f"{says}, the same; --fix drops the second")
    return error("tensor-conflict", key, f"{says}, and they differ: which one counts depends on the loader")


def _stale(index: Mapping[str, str], tensors: Mapping[str, TensorInfo], readable: set[str]) -> Iterator[Finding]:
    for key, file in index.items():
        if file in readable and (key not in tensors or tensors[key].file != file):
            place = f"is in {tensors[key].file}" if key in tensors else "is in none of the files"
            yield error("index-stale", key, f"the index says {key} is in {file}; it {place}")
    for key in tensors.keys() - index.keys():
        yield error("index-stale", key, f"{key} is in {tensors[key].file}, and the index does not list it; --fix does")


def _wrong_size(files: Files) -> Iterator[Finding]:
    metadata = read_json(files.path / INDEX_FILE).get("metadata")
    declared = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = files.checkpoint.total_bytes
    if files.whole and declared is not None and declared != total:
        text = (
            f"the index gives a total_size of {str(declared)[:40]} bytes, the tensors have {total}; --fix corrects it"
        )
        yield warning("index-size", INDEX_FILE, text)


def check_manifest(files: Files) -> tuple[list[Finding], list[str]]:
    """(changed, lost and added files of one of our exports, notes); reads every file once."""
    report = files.objects.get(REPORT_FILE)
    if report is None:
        return [], []
    hashes = report.get(FILES_KEY)
    if hashes is None:
        return [], [f"{REPORT_FILE} records no hashes of the files, so changed weights can be told by a reference only"]
    if not isinstance(hashes, dict) or not all(isinstance(value, str) for value in hashes.values()):
        return [error("manifest", REPORT_FILE, f"{FILES_KEY} holds no names and hashes")], []
    findings = [finding for name, known in hashes.items() for finding in _against(files.path, name, known)]
    weights = [
        name for name in files.names if name.endswith((WEIGHTS_SUFFIX, ".gguf", *PICKLE_SUFFIXES)) or name == INDEX_FILE
    ]
    findings += [
        error("added", name, f"{name} was not there when the checkpoint was written, and some loader may read it")
        for name in weights
        if name not in hashes
    ]
    return findings, [f"{len(hashes)} files compared with their SHA-256 of when they were written"]


def _against(path: Path, name: str, known: str) -> Iterator[Finding]:
    parts = name.split("/")
    file = path.joinpath(*parts)
    inside = name and not hostile_names(parts) and not any(map(leaves, (file, path / parts[0])))
    if not inside or not os.path.isfile(file):
        yield error("lost", name[:200], f"{name[:200]} was written with the checkpoint and is not there now")
        return
    try:
        found = file_hash(file)
    except SourceError as fault:
        yield refused(fault, name)
        return
    if found != known:
        text = f"{name} is not what was written: its SHA-256 is {found[:16]}..., it was {known[:16]}..."
        yield error("changed", name, f"{text}; take it from the original export")
