"""All runs of a data directory, by name. One that is damaged is set aside; the others are served."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote

from fedel_services.job_code import FolderShelf
from fedel_services.job_code import load as load_code
from fedel_services.threads import in_thread

from fedel import plugins
from fedel.errors import FedelError, UpdateRefused
from fedel.files import safe_name, sync_directory
from fedel.plugins import Allowed
from fedel.roles.gate import objection_to_name
from fedel.v1.aggregator_pb2 import ModelHeader
from fedel_aggregator.errors import Damaged
from fedel_aggregator.first_model import FirstModel
from fedel_aggregator.private_files import make_folder
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.run import ShardRun
from fedel_aggregator.run_header import HEADER_FILE, read_code_hash

log = logging.getLogger("fedel.aggregator")
T = TypeVar("T")
P = ParamSpec("P")
RETRY_SECONDS = 10.0
"""How long a run stays set aside before it is loaded again: its file may have been restored."""


@dataclass(frozen=True)
class _SetAside:
    """A run that cannot be used."""

    folder: Path
    why: str
    since: float


class Runs:
    """Used on the event loop, but for ``load``."""

    def __init__(self, data_dir: Path, keep_updates: int = 0, code: Allowed | None = None) -> None:
        """``code`` is what the method of a job may be, beside FedEL's own."""
        self._keep_updates, self._code = keep_updates, code or Allowed()
        self._folder = data_dir / "runs"
        self._deleted = data_dir / "deleted"
        """What is on its way out: a folder is moved here at once, then removed."""
        self.shelf = FolderShelf(data_dir / "code")
        """Code that came with jobs."""
        self._recycled = RecycledFiles(data_dir / "spare")
        self._runs: dict[str, ShardRun] = {}
        self._set_aside: dict[str, _SetAside] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self.loaded = False

    def load(self) -> None:
        """Continue every run where it was, and fold again what had been acknowledged."""
        make_folder(self._folder)
        shutil.rmtree(self._deleted, ignore_errors=True)
        for folder in sorted(self._folder.iterdir()):
            self._enter(self._read(folder))
        self.shelf.drop_unused({read_code_hash(folder) for folder in self._folder.iterdir()})
        self.loaded = True

    def _read(self, folder: Path, verify: bool = False) -> ShardRun | _SetAside | None:
        """The run in a folder; ``None`` if there is none."""
        try:
            if not _is_run(folder):
                return None
            with self._code_of(read_code_hash(folder), unquote(folder.name)):
                return ShardRun(folder, self._recycled, self._keep_updates, verify=verify)
        except (FedelError, OSError) as error:
            return _SetAside(folder, str(error), time.monotonic())
        except Exception as error:
            log.exception("a run cannot be loaded", extra={"run": unquote(folder.name)})
            why = f"{folder}: it cannot be loaded ({type(error).__name__}: {error}); restore it from a copy"
            return _SetAside(folder, why, time.monotonic())

    def _enter(self, read: ShardRun | _SetAside | None) -> None:
        if read is None:
            return
        if isinstance(read, _SetAside):
            name = unquote(read.folder.name)
            self._runs.pop(name, None)
            self._set_aside[name] = read
            log.error("the run is set aside, the others are served: %s", read.why, extra={"run": name})
            return
        self._set_aside.pop(read.name, None)
        self._runs[read.name] = read
        fields = {"run": read.name, "round": read.version, "num_updates": len(read.round.clients)}
        log.info("loaded a run", extra=fields)

    def all(self) -> list[ShardRun]:
        """Those that are served."""
        return list(self._runs.values())

    def set_aside(self, name: str, error: Damaged) -> None:
        """Serve a run no more, because one of its files is damaged."""
        if name in self._runs:
            self._enter(_SetAside(self._folder / safe_name(name), str(error), time.monotonic()))

    def lock(self, name: str) -> asyncio.Lock:
        """Held while a thread works on a run, and while its first model is received."""
        return self._locks.setdefault(name, asyncio.Lock())

    def check(self, name: str) -> None:
        """Refuse calls while the runs are being loaded, and names that are none."""
        if not self.loaded:
            raise UpdateRefused("starting", "the aggregator is still loading its runs: try again in a moment")
        if objection := objection_to_name(name, "name of the run"):
            raise UpdateRefused("header", objection)

    async def find(self, name: str) -> ShardRun:
        """A run; one that was set aside is looked at again now and then."""
        self.check(name)
        if self._may_be_mended(name):
            async with self.lock(name):
                # Another call may have looked while this one waited.
                if aside := self._may_be_mended(name):
                    read = await in_thread(self._read, aside.folder, True)
                    del self._set_aside[name]
                    self._enter(read)
        return self._current(name)

    def _may_be_mended(self, name: str) -> _SetAside | None:
        """A run that was set aside, if it is time to look at it again."""
        aside = self._set_aside.get(name)
        return aside if aside and time.monotonic() - aside.since >= RETRY_SECONDS else None

    def _current(self, name: str) -> ShardRun:
        if name in self._set_aside:
            raise Damaged(f"run '{name}' is set aside: {self._set_aside[name].why}")
        try:
            return self._runs[name]
        except KeyError:
            raise UpdateRefused(
                "unknown_run", f"there is no run '{name}' here; `fedel runs` lists them"
            ) from None

    async def use(
        self, name: str, method: Callable[Concatenate[ShardRun, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a run's method in a thread, while nobody else works on the run."""
        await self.find(name)
        async with self.lock(name):
            # It may have been set aside, and loaded again, while this call waited.
            run = self._current(name)
            try:
                return await in_thread(lambda: method(run, *args, **kwargs))
            except Damaged as error:
                self.set_aside(name, error)
                raise

    async def delete(self, name: str, dry_run: bool = False) -> int:
        """Everything of a run, also of one that is set aside; how many bytes it was."""
        self.check(name)
        async with self.lock(name):
            num_bytes = await in_thread(self._remove, self._folder / safe_name(name), dry_run)
            if not dry_run:
                self._runs.pop(name, None)
                self._set_aside.pop(name, None)
        return num_bytes

    def _remove(self, folder: Path, dry_run: bool) -> int:
        if not folder.exists():
            return 0
        num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if not dry_run:
            make_folder(self._deleted)
            gone = self._deleted / f"{folder.name}-{time.time_ns()}"
            folder.rename(gone)
            sync_directory(self._folder)
            shutil.rmtree(gone, ignore_errors=True)
        return num_bytes

    async def first_model(self, header: ModelHeader) -> FirstModel | None:
        """Where to put a run's first model; ``None`` if the same run exists already. Needs the run's lock."""
        name, folder = header.run, self._folder / safe_name(header.run)
        if name not in self._runs and name not in self._set_aside:
            # It may be there: if its call was cancelled when all was written.
            self._enter(await in_thread(self._read, folder))
        if name not in self._runs and name not in self._set_aside:
            return await in_thread(self._begin, folder, header)
        if self._current(name).header != header:
            raise UpdateRefused("conflict", f"run '{name}' exists with another model: rename the new run")
        return None

    def _begin(self, folder: Path, header: ModelHeader) -> FirstModel:
        with self._code_of(header.code_sha256, header.run):
            return FirstModel(folder, header, self._recycled, self._keep_updates)

    async def finish(self, model: FirstModel) -> None:
        """Make the run of a first model that is complete. Needs the run's lock."""
        self._enter(await in_thread(self._finish, model))

    def _finish(self, model: FirstModel) -> ShardRun:
        with self._code_of(model.header.code_sha256, model.header.run):
            return model.finish()

    @contextmanager
    def _code_of(self, sha256: str, run: str) -> Iterator[None]:
        """Inside, the code that this server allows, and what came with the job."""
        try:
            code = load_code(self.shelf, sha256, f"{self._folder} {run}")
        except FedelError as error:
            raise UpdateRefused("header", f"run '{run}': {error}") from None
        with plugins.only(self._code, code):
            yield


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run's; one whose creation did not end has no header and no later version."""
    return (folder / HEADER_FILE).exists() or any((folder / "versions").glob("[0-9]*[1-9]*.json"))
