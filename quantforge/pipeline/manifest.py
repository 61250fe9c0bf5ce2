"""SHA-256 of every file of an export, kept in its report, so that any byte that changes later is found."""

import hashlib
from pathlib import Path

from quantforge.model.shards import opened

REPORT_FILE = "quantforge.json"
FILES_KEY = "files"
CHUNK_BYTES = 16 << 20


def file_hash(file: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; SourceError when it cannot be read."""
    digest = hashlib.sha256()
    with opened(file) as handle:
        while chunk := handle.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def file_hashes(directory: Path) -> dict[str, str]:
    """The hash of every file below a directory but its report, by relative path."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    names = {file.relative_to(directory).as_posix(): file for file in files}
    names.pop(REPORT_FILE, None)
    return {name: file_hash(file) for name, file in names.items()}
