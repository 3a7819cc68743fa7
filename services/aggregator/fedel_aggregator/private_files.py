"""Files and folders that only the aggregator's own user can read: they hold models and updates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedel.files import write_atomic

FILE_MODE = 0o600
_FOLDER_MODE = 0o700


def make_folder(path: Path) -> None:
    path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)


def write_private(path: Path, data: bytes | str) -> None:
    """Replace the file by ``data``, all of it or nothing."""
    write_atomic(path, data, mode=FILE_MODE)


def open_private(path: Path) -> int:
    """A handle to read and write a file, which is made if it is not there."""
    return os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system say which file it is about; one of an open file does not know."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
