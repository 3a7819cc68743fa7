"""Makes a backup while the federation runs: whole, and of one moment.

Most bytes are copied first, while rounds go on. Then the database is frozen, and what has changed is copied
again: a round waits for no longer than that takes. At the frozen moment the aggregators are where a crash of
the coordinator would leave them, at the database's round, or one ahead if that round is sealed. A run goes on
from there by itself (``tests/services/coordinator/test_restart.py``).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import unquote

from fedel import __version__
from fedel.backup.database import Snapshot, snapshot
from fedel.backup.manifest import FORMAT, MANIFEST, FileFacts, Manifest, RunRounds, facts_of, rounds_of
from fedel.backup.mirror import Mirror
from fedel.backup.places import AUTHORITY, DATABASE, Places
from fedel.errors import ConfigError, DataError
from fedel.files import TEMPORARY, sync_directory, write_atomic
from fedel.security.authority import CA_KEY, locked
from fedel.serialisation import to_json


@dataclass(frozen=True)
class Made:
    manifest: Manifest
    frozen_seconds: float
    """How long no round could go on."""


def make(target: Path, places: Places, while_frozen: Callable[[], None] = lambda: None) -> Made:
    """Write a backup to a folder that does not exist yet; it gets its name when it is whole.

    ``while_frozen`` is for what is kept elsewhere and must be of the same moment, such as snapshots of volumes.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already: name a new folder, such as one with today's date")
    for name, folder in places.data().items():
        if not folder.is_dir():
            raise DataError(f"{name}: there is no folder {folder}: run this where the aggregator runs")
    unfinished = target.with_name(f".{target.name}{TEMPORARY}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700, parents=True)
    try:
        made = _Making(unfinished, places, while_frozen).make()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    unfinished.rename(target)
    sync_directory(target.parent)
    return made


@dataclass
class _Making:
    folder: Path
    places: Places
    while_frozen: Callable[[], None]
    files: dict[str, FileFacts] = field(default_factory=dict)

    def make(self) -> Made:
        mirrors = {name: Mirror(data, self.folder / name) for name, data in self.places.data().items()}
        for mirror in mirrors.values():
            mirror.update()
        runs, schema, frozen_seconds = dict[str, RunRounds](), None, 0.0
        if self.places.coordinator is None:
            for mirror in mirrors.values():
                mirror.settle()
        else:
            with snapshot(self.places.coordinator.database_url) as database:
                frozen_seconds = self._settle(database, list(mirrors.values()))
                runs, schema = database.rounds(), database.schema
                database.copy_to(self.folder / DATABASE)
            self.files[DATABASE] = facts_of(self.folder / DATABASE)
        for name, mirror in mirrors.items():
            self._take(name, mirror)
            runs = rounds_of(runs, name, newest_versions(self.folder / name))
        self._copy_certificates()
        made_at = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
        manifest = Manifest(FORMAT, __version__, made_at, schema, runs, self.files)
        _sync(self.folder)
        write_atomic(self.folder / MANIFEST, to_json(manifest, pretty=True), mode=0o600)
        return Made(manifest, frozen_seconds)

    def _settle(self, database: Snapshot, mirrors: list[Mirror]) -> float:
        with database.freeze():
            started = time.monotonic()
            for mirror in mirrors:
                mirror.settle()
            self.while_frozen()
            return time.monotonic() - started

    def _take(self, name: str, mirror: Mirror) -> None:
        self.files.update({f"{name}/{file}": facts for file, facts in mirror.files.items()})

    def _copy_certificates(self) -> None:
        authority = self.places.authority
        if authority is not None:
            if not (authority / CA_KEY).is_file():
                raise DataError(f"{authority} has no {CA_KEY}: run this where the authority is")
            with locked(authority):
                self._copy(AUTHORITY, authority)
        for name, folder in self.places.certs().items():
            self._copy(name, folder)

    def _copy(self, name: str, folder: Path) -> None:
        mirror = Mirror(folder, self.folder / name)
        mirror.update()
        self._take(name, mirror)


def newest_versions(data: Path) -> dict[str, int]:
    """By run: its newest version in the data of an aggregator."""
    found = {}
    for header in data.glob("runs/*/run.pb"):
        versions = [int(path.stem) for path in header.parent.glob("versions/*.json") if path.stem.isdecimal()]
        found[unquote(header.parent.name)] = max(versions, default=0)
    return found


def _sync(folder: Path) -> None:
    for path, _, files in os.walk(folder):
        for name in files:
            with Path(path, name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(path))
