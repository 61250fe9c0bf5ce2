"""Files that are whole or not there: flushed to the disk, renamed into place, and plain words when the disk refuses."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from quantforge.errors import WorkspaceError

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def disk_errors(*works: Path, kept: bool = True) -> Iterator[None]:
    """The one place where what the system refuses becomes a message: a full disk, missing rights, a name too long.

    `works` are the work directories; `kept` says that finished layers stay in them.
    """
    try:
        yield
    except OSError as error:
        file = error.filename2 or error.filename or works[0]
        reason = "the disk is full" if error.errno in FULL else error.strerror or str(error)
        advice = "free some space" if error.errno in FULL else "remove the cause, or choose another --output,"
        layers = (
            f"; finished layers are kept in {', '.join(map(str, works))}. To continue" if kept else ". To try again"
        )
        raise WorkspaceError(
            f"{reason}: {file} could not be written or read. Nothing was published{layers}, {advice} and run the same "
            "command again."
        ) from error


@contextmanager
def durable(file: Path) -> Iterator[BinaryIO]:
    """Open for writing, flush to the disk at the end; an OSError names the file."""
    try:
        with open(file, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def write_atomically(file: Path, *parts: bytes | memoryview) -> None:
    """Write under a temporary name, flush to the disk, rename. A failure leaves no partial file behind."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        with durable(temporary) as handle:
            for part in parts:
                handle.write(part)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(file.parent)


def sync_file(path: Path) -> None:
    """Make what was written to a file, or renamed in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_directory = sync_file
