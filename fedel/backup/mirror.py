"""A copy of a folder that a server goes on to write to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedel.backup.manifest import CHUNK_BYTES, FileFacts
from fedel.errors import ServiceError
from fedel.files import TEMPORARY

Stamp = tuple[int, int, int]
"""Size, time of the last change, and number of a file: another stamp, another content."""
MAX_TRIES = 20
UPDATE = ".update"
"""How the journal names an update that counts: the only files that come while a round is open."""
SKIPPED = frozenset(("lock", "spare", "deleted"))
"""In the folder itself: what stays with the process that uses it, or goes."""
UNFINISHED = (TEMPORARY, ".part", ".bad")
"""Ends of the names of files that nobody needs: a client sends what did not arrive again from its beginning."""


@dataclass
class Mirror:
    """``update`` brings the copy to what the folder holds; what is there already is not copied again."""

    source: Path
    target: Path
    files: dict[str, FileFacts] = field(default_factory=dict)
    """By path in the folder."""
    _stamps: dict[str, Stamp] = field(default_factory=dict)

    def update(self) -> None:
        found = dict(_listing(self.source))
        for name, stamp in found.items():
            if self._stamps.get(name) == stamp:
                continue
            try:
                self.files[name] = copy_file(self.source / name, self.target / name)
            except FileNotFoundError:
                continue  # the server has just deleted it
            self._stamps[name] = stamp
        for name in self._stamps.keys() - found.keys():
            (self.target / name).unlink(missing_ok=True)
            del self._stamps[name], self.files[name]

    def settle(self) -> None:
        """Update until the server changed nothing meanwhile, updates that came in apart.

        Needs the database to be frozen: without it no server begins anything, so that few changes can come.
        """
        for _ in range(MAX_TRIES):
            before = self._lasting()
            self.update()
            if before == self._lasting():
                return
        raise ServiceError(f"{self.source} changes all the time: pause the runs, then try again")

    def _lasting(self) -> dict[str, Stamp]:
        return {name: stamp for name, stamp in _listing(self.source) if not name.endswith(UPDATE)}


def _listing(folder: Path) -> Iterator[tuple[str, Stamp]]:
    """The files in a folder, rounds before versions: a round whose version is made is of no use any more."""
    for path, folders, files in os.walk(folder):
        skipped = SKIPPED if Path(path) == folder else ()
        folders[:] = sorted(name for name in folders if name not in skipped)
        for name in sorted(files):
            if name in skipped or name.endswith(UNFINISHED):
                continue
            file = Path(path, name)
            try:
                state = file.stat()
            except FileNotFoundError:
                continue
            yield str(file.relative_to(folder)), (state.st_size, state.st_mtime_ns, state.st_ino)


def copy_file(source: Path, target: Path) -> FileFacts:
    """Copy a file with its mode; the checksum is of the bytes that were read."""
    digest, num_bytes = hashlib.sha256(), 0
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with source.open("rb") as old:
        mode = os.fstat(old.fileno()).st_mode & 0o777
        target.unlink(missing_ok=True)
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as new:
            while chunk := old.read(CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += new.write(chunk)
    return FileFacts(num_bytes, digest.hexdigest())
