"""Files of closed rounds, kept to be written over by the next one's updates.

A new file's pages must be found, cleared and given blocks on disk; that can cost several times the copying of
the bytes that go there. A file that is there already has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from uuid import uuid4

MOST_BYTES = 1 << 30
"""Disk that spare files may hold."""
MOST_FILES = 256


class Spares:
    """A folder of spare files, on the file system of those they become; every run shares it, in any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, path: Path) -> None:
        """Let a spare file become ``path``, whatever is in it; nothing happens if none is left."""
        with self._lock:
            spare = next(self._folder.iterdir(), None)
            if spare is not None:
                spare.rename(path)

    def give(self, paths: Iterable[Path]) -> None:
        """Keep as many of these files as there is room for."""
        with self._lock:
            sizes = [spare.stat().st_size for spare in self._folder.iterdir()]
            num_files, num_bytes = len(sizes), sum(sizes)
            for path in paths:
                num_files, num_bytes = num_files + 1, num_bytes + path.stat().st_size
                if num_files > MOST_FILES or num_bytes > MOST_BYTES:
                    return
                path.rename(self._folder / uuid4().hex)
