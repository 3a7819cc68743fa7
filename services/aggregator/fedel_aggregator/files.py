"""Files that a crash cannot tear: a temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

TEMPORARY = ".tmp"
_LONGEST_NAME = 150


def safe_name(name: str) -> str:
    """A file name for any text, such as the name of a client.

    >>> safe_name("jetson-3"), safe_name("../etc")
    ('jetson-3', '%2E%2E%2Fetc')
    """
    quoted = quote(name, safe="").replace(".", "%2E")
    return quoted if len(quoted) <= _LONGEST_NAME else hashlib.sha256(name.encode()).hexdigest()


def sync_directory(path: Path) -> None:
    """Make what was created, renamed or deleted in a directory last."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[int]:
    """A file descriptor to write; when the block ends well the file is safe under its name, else it is gone."""
    temporary = path.with_name(path.name + TEMPORARY)
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        try:
            yield handle
            os.fsync(handle)
        finally:
            os.close(handle)
        temporary.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def write_all(handle: int, offset: int, *pieces: bytes | memoryview) -> int:
    """Write pieces one after the other, at once, to the last byte; returns how many bytes that was."""
    left, end = [memoryview(piece) for piece in pieces], offset
    while left:
        written = os.pwritev(handle, left, end)
        end += written
        # One call may write fewer than asked for.
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
    return end - offset


def write_file(path: Path, data: bytes) -> None:
    with replacing(path) as handle:
        write_all(handle, 0, data)
