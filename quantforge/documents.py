"""Reading documents: a file, a folder or a hub data set becomes one lazy sequence of documents, in stored order.

What one document is, for every source:

- ``.txt`` and ``.raw``: the whole file, newlines and all;
- ``.jsonl``, ``.json``, ``.parquet``, a folder written by ``datasets.save_to_disk``, a hub data set: one row, the value
  of its column (``text``, else ``messages``, else the one that is asked for);
- a folder: the documents of its files, sorted by name; sub-folders and hidden files are not read;
- ``builtin``: one topic of Python's own help, ``pydoc_data.topics``, sorted by name.

pyarrow and datasets are imported when a source needs them, never before.
"""

import importlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantforge.errors import CalibrationError

TEXT_SUFFIXES = (".txt", ".raw")
ROW_SUFFIXES = (".jsonl", ".json", ".parquet")
COLUMNS = ("text", "messages")


@dataclass(frozen=True)
class Document:
    """One document and where it was found. `content` is text, or a conversation: a list of {role, content}."""

    where: str
    content: str | list[dict[str, Any]]


@dataclass(frozen=True)
class Corpus:
    """A source of documents. `documents` is read lazily and once; `source` describes it and holds no folder names."""

    source: str
    documents: Iterator[Document]


Row = tuple[str, Mapping[str, Any]]


def read_corpus(
    dataset: str | None, *, split: str | None = None, subset: str | None = None, column: str | None = None
) -> Corpus:
    """Open `dataset`: None or ``builtin``, a file, a folder, or a hub id; `split` is ``train`` unless given.

    Raises:
        CalibrationError: at once or while documents are read; no such file, unknown extension, not UTF-8, a line that
            is not JSON (with its number), a missing column, a data set that cannot be reached.
    """
    if dataset is None or dataset == "builtin":
        return Corpus(f"builtin (pydoc_data.topics of Python {platform.python_version()})", _builtin())
    path = Path(dataset).expanduser()
    if path.is_dir():
        return Corpus(path.resolve().name, _folder(path, split, column))
    if path.is_file():
        return Corpus(path.name, _file(path, column))
    if path.suffix.lower() in TEXT_SUFFIXES + ROW_SUFFIXES or path.is_absolute() or dataset.startswith((".", "~")):
        raise CalibrationError(f"no such file or folder: {dataset}")
    split = split or "train"
    parts = [dataset, f"split {split}", *([f"subset {subset}"] if subset else [])]
    return Corpus(", ".join(parts), _documents(_hub_rows(dataset, split, subset), column))


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, every line ending read as ``\\n``."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror}") from error


# --------------------------------------------------------------------------------------- rows to documents


def _documents(rows: Iterable[Row], column: str | None) -> Iterator[Document]:
    for where, row in rows:
        name = column or next((c for c in COLUMNS if c in row), COLUMNS[0])
        found = ", ".join(map(str, row)) or "none"
        if name not in row:
            raise CalibrationError(
                f"{where} has no column {name!r}; columns found: {found}; set --column to one of them"
            )
        value = row[name]
        if value is None:
            yield Document(where, "")
        elif isinstance(value, str) or _is_conversation(value):
            yield Document(where, value)
        else:
            raise CalibrationError(
                f"column {name!r} of {where} holds {type(value).__name__}, neither text nor messages (a list of "
                f"{{role, content}}); columns found: {found}; set --column to another of them"
            )


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)


def _builtin() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"topic {name!r}", topics[name])


def _folder(path: Path, split: str | None, column: str | None) -> Iterator[Document]:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        yield from _documents(_saved_rows(path, split), column)
        return
    known = TEXT_SUFFIXES + ROW_SUFFIXES
    files = sorted(f for f in path.iterdir() if f.is_file() and not f.name.startswith("."))
    readable = [f for f in files if f.suffix.lower() in known]
    if not readable:
        raise CalibrationError(
            f"{path} holds no file that can be read ({', '.join(known)}) and was not written by save_to_disk; "
            f"files found: {', '.join(f.name for f in files[:8]) or 'none'}"
        )
    for file in readable:
        yield from _file(file, column)


def _file(path: Path, column: str | None) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        return iter([Document(path.name, read_text(path))])
    if suffix == ".jsonl":
        return _documents(_json_lines(path), column)
    if suffix == ".json":
        return _documents(_json_rows(path), column)
    if suffix == ".parquet":
        return _documents(_parquet_rows(path, column), column)
    known = ", ".join(TEXT_SUFFIXES + ROW_SUFFIXES)
    raise CalibrationError(
        f"{path.name}: unknown extension {path.suffix!r}; --dataset reads {known}, a folder or a hub id"
    )


# --------------------------------------------------------------------------------------------- structured files


def _json_lines(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(f"{path.name} line {number}", line)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error


def _row(where: str, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise CalibrationError(
            f"{where} is not JSON: {error.msg} at column {error.colno}: {line.strip()[:60]}"
        ) from error
    if not isinstance(row, dict):
        raise CalibrationError(
            f'{where} holds {type(row).__name__}; each line must be an object such as {{"text": ...}}'
        )
    return where, row


def _json_rows(path: Path) -> Iterator[Row]:
    """A list of objects, or JSON lines under the wrong name."""
    text = read_text(path).lstrip("\ufeff")
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{"):
            yield from _json_lines(path)
            return
        raise CalibrationError(f"{path.name} line {error.lineno} is not JSON: {error.msg}") from error
    for index, row in enumerate(rows if isinstance(rows, list) else [rows]):
        if not isinstance(row, dict):
            raise CalibrationError(
                f'{path.name} row {index} holds {type(row).__name__}, not an object such as {{"text": ...}}'
            )
        yield f"{path.name} row {index}", row


def _parquet_rows(path: Path, column: str | None) -> Iterator[Row]:
    parquet = _import("pyarrow.parquet", "read .parquet files", "pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = column or next((c for c in COLUMNS if c in names), None)
            columns = [wanted] if wanted in names else None  # None: all of them, for the message about the missing one
            index = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    yield f"{path.name} row {index}", row
                    index += 1
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise CalibrationError(f"{path.name} cannot be read as parquet: {error}") from error


# ----------------------------------------------------------------------------------------------------- datasets


def _saved_rows(path: Path, split: str | None) -> Iterator[Row]:
    datasets = _import("datasets", "read a folder written by save_to_disk", "datasets")
    try:
        table = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path} cannot be read as a saved data set: {error}") from error
    if isinstance(table, dict):  # a DatasetDict
        name = split or "train"
        if name not in table:
            raise CalibrationError(f"{path} has no split {name!r}; splits found: {', '.join(table)}; set --split")
        table = table[name]
    for index, row in enumerate(table):
        yield f"{path.name} row {index}", row


def _hub_rows(dataset: str, split: str, subset: str | None) -> Iterator[Row]:
    """Rows of a hub data set: streamed, so that a few rows of a huge one are cheap, or from the cache when offline."""
    datasets = _import("datasets", f"load {dataset!r} from the hub", "datasets")
    try:
        rows = datasets.load_dataset(dataset, name=subset, split=split, streaming=not datasets.config.HF_HUB_OFFLINE)
        for index, row in enumerate(rows):
            yield f"{dataset} row {index}", row
    except ConnectionError as error:
        offline = " (HF_HUB_OFFLINE is set and it is not in the cache)" if datasets.config.HF_HUB_OFFLINE else ""
        raise CalibrationError(
            f"{dataset!r} is no local file or folder, and the hub could not be reached{offline}: {error}. Pass a file, "
            f"--dataset FILE ({', '.join(TEXT_SUFFIXES + ROW_SUFFIXES)}), or --dataset builtin: they need no network"
        ) from error
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"{dataset!r} is no local file or folder and could not be loaded from the hub (--split {split}, --subset "
            f"{subset or 'not set'}): {error}"
        ) from error


def _import(module: str, purpose: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CalibrationError(f"{package} is needed to {purpose}: pip install {package}") from error


def _not_utf8(path: Path, error: UnicodeDecodeError) -> CalibrationError:
    return CalibrationError(
        f"{path.name} is not UTF-8 text: byte 0x{error.object[error.start]:02x}, {error.reason}; "
        f"convert it first: iconv -f latin1 -t utf-8 {path.name}"
    )
