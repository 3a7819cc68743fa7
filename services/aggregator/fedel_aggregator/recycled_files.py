"""Files of closed rounds, kept to be overwritten by the updates of later ones.

A new file costs more than its bytes: the system must find pages, clear them and reserve blocks on disk, which
can take several times as long as copying the bytes. A recycled file has all of that already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from uuid import uuid4

from fedel_aggregator.private_files import make_folder

MAX_BYTES = 1 << 30
"""Disk space that recycled files may hold."""
MAX_FILES = 256
_OWN_NAME = re.compile("[0-9a-f]{32}")


class RecycledFiles:
    """A folder of files to reuse, on the file system where they are needed. All runs and threads share it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        make_folder(folder)

    def _files(self) -> Iterator[Path]:
        return (path for path in self._folder.iterdir() if _OWN_NAME.fullmatch(path.name))

    def take(self, path: Path) -> None:
        """Rename a recycled file to ``path``, with its old content; does nothing if none is left."""
        with self._lock:
            recycled = next(self._files(), None)
            if recycled is not None:
                recycled.rename(path)

    def give(self, paths: Iterable[Path]) -> None:
        """Keep as many of these files as the limits allow; the others stay where they are."""
        with self._lock:
            sizes = [recycled.stat().st_size for recycled in self._files()]
            num_files, num_bytes = len(sizes), sum(sizes)
            for path in paths:
                num_files, num_bytes = num_files + 1, num_bytes + path.stat().st_size
                if num_files > MAX_FILES or num_bytes > MAX_BYTES:
                    return
                path.rename(self._folder / uuid4().hex)
