"""Files that are whole or not there: written under a temporary name, synced, renamed, the directory synced."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

TEMPORARY = ".tmp"
"""How the temporary name of a file ends that is still being written. A crash may leave one behind."""
_LONGEST_NAME = 150
"""Characters; file systems allow 255 bytes, and callers add prefixes and endings."""


def safe_name(name: str) -> str:
    """A file name for any text, such as the name of a run; different texts get different names.

    A long text is cut, with a hash at its end. The ``+`` before the hash occurs in no short name.

    >>> safe_name("jetson-3"), safe_name("vgg16/night 2"), safe_name("..")
    ('jetson-3', 'vgg16%2Fnight%202', '%2E%2E')
    """
    quoted = quote(name, safe="").replace(".", "%2E") or "%"
    if len(quoted) <= _LONGEST_NAME:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{quoted[: _LONGEST_NAME - len(digest) - 1]}+{digest}"


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replace the file by ``data``, all of it or nothing; text is written as UTF-8. See ``open_atomic``."""
    with open_atomic(path, mode=mode, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def open_atomic(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, which replaces ``path`` when the block ends without an error.

    ``mode`` (less the umask) holds from the first byte, so that a key can never be read by others. A durable
    file and its name are on disk when this returns: a power cut does not undo it. Makes missing directories.
    """
    _make_directory(path.parent, durable)
    # Its own name for every process and thread, so that two writers of one file do not disturb each other.
    part = path.with_name(f".{path.name[:50]}.{os.getpid()}-{threading.get_native_id()}{TEMPORARY}")
    part.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make everything that was created, renamed or deleted in a directory survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_directory(path: Path, durable: bool) -> None:
    if path.is_dir():
        return
    _make_directory(path.parent, durable)
    path.mkdir(exist_ok=True)
    if durable:
        sync_directory(path.parent)
