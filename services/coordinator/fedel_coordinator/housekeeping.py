"""Deletes runs that are over: when an operator says so, and by the retention settings of the coordinator.

The rows go last: where a deletion breaks off, the run is still listed, and deleting it again does the rest.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedel.errors import ConfigError, ServiceError
from fedel.roles.retention import Ended, to_delete, too_old
from fedel.roles.run_state import ENDED
from fedel_coordinator.errors import AggregatorAway, RunActive
from fedel_coordinator.run import CoordinatorRun
from fedel_coordinator.run_services import RunServices
from fedel_coordinator.shards import StoppedWaiting
from fedel_coordinator.store import RunRow

log = logging.getLogger(__name__)
LOOK_SECONDS = 3600.0
"""Between two looks for runs that are too old or too many."""


@dataclass(frozen=True)
class Deleted:
    """What was deleted of a run, or would be."""

    run: str
    found: bool = False
    num_rounds: int = 0
    folder_bytes: int = 0
    aggregator_bytes: int = 0
    ended_at: float = 0.0


class Housekeeper:
    """Used on the event loop alone."""

    def __init__(
        self,
        services: RunServices,
        runs: dict[str, CoordinatorRun],
        drives: dict[str, asyncio.Task[None]],
    ) -> None:
        """``runs`` are those that this process drives or has driven."""
        self._services, self._runs, self._drives = services, runs, drives
        self._turn = asyncio.Lock()

    async def delete(
        self, names: Sequence[str], older_than_seconds: float | None = None, dry_run: bool = False
    ) -> list[Deleted]:
        """Runs by their names, and those that ended longer ago; refused if one of the names is not over."""
        if older_than_seconds is not None and not (
            math.isfinite(older_than_seconds) and older_than_seconds >= 0
        ):
            raise ConfigError(f"older_than_seconds is {older_than_seconds:g}: name a time of 0 or more")
        async with self._turn:
            rows = await self._rows()
            if active := [name for name in names if self._is_active(name)]:
                raise RunActive(
                    f"not over: {', '.join(active)}. Nothing was deleted; `fedel runs stop NAME` ends a run"
                )
            old = [] if older_than_seconds is None else self._older(rows.values(), older_than_seconds)
            wanted = dict.fromkeys((*names, *old))
            return [await self._delete(name, rows.get(name), dry_run) for name in wanted]

    async def keep_tidy(self, keep_days: float, keep_number: int) -> None:
        """Delete what is too old or too much, again and again; a limit of 0 is none."""
        while keep_days or keep_number:
            try:
                ended = _ended((await self._rows()).values())
                for name in to_delete(ended, self._services.clock(), keep_days, keep_number):
                    await self.delete([name])
            except ServiceError as error:
                log.warning("runs that are too old or too many are not deleted yet: %s", error)
            await asyncio.sleep(LOOK_SECONDS)

    async def _rows(self) -> dict[str, RunRow]:
        return {row.name: row for row in await asyncio.to_thread(self._services.store.runs, brief=True)}

    def _is_active(self, name: str) -> bool:
        return name in self._runs and not self._runs[name].ended

    def _older(self, rows: Iterable[RunRow], seconds: float) -> list[str]:
        return too_old(_ended(rows), self._services.clock(), seconds)

    async def _delete(self, name: str, row: RunRow | None, dry_run: bool) -> Deleted:
        directory = self._services.directory(name) if row else None
        folder = directory.path if directory else None
        deleted = Deleted(
            run=name,
            found=row is not None,
            num_rounds=row.model_version if row else 0,
            folder_bytes=await asyncio.to_thread(_size, folder) if folder else 0,
            aggregator_bytes=await self._at_aggregators(name, dry_run),
            ended_at=(row.ended_at or row.created_at) if row else 0.0,
        )
        if not dry_run:
            await self._forget(name)
            if folder is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            await asyncio.to_thread(self._services.store.delete_run, name)
            log.info("run '%s' is deleted: %s", name, deleted, extra={"run": name})
        return deleted

    async def _at_aggregators(self, name: str, dry_run: bool) -> int:
        try:
            return await self._services.shards.delete(name, dry_run)
        except StoppedWaiting:
            raise AggregatorAway(
                f"an aggregator does not answer: run '{name}' is still listed; start it, then delete the run"
                " again"
            ) from None

    async def _forget(self, name: str) -> None:
        run, drive = self._runs.pop(name, None), self._drives.pop(name, None)
        if drive is not None:
            await asyncio.gather(drive, return_exceptions=True)
        if run is not None:
            await run.stop()
        self._services.metrics.forget(name)


def _ended(rows: Iterable[RunRow]) -> list[Ended]:
    return [Ended(row.name, row.ended_at or row.created_at) for row in rows if row.phase in ENDED]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
