"""Finds runs and tells of them, whether this process drives them or they ended before it began."""

from __future__ import annotations

import asyncio
import json

from fedel_services.http import Problem

from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.run import Run
from fedel_coordinator.web import views
from fedel_coordinator.web.rounds import Known, Rounds


class Reader:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._store = coordinator, coordinator.store
        self.rounds = Rounds(coordinator.store)

    def now(self) -> float:
        return self._coordinator.clock()

    @property
    def heartbeat_seconds(self) -> float:
        return self._coordinator.config.heartbeat_seconds

    async def all(self) -> list[Known]:
        """Newest first."""
        rows = await asyncio.to_thread(self._store.runs)
        return [self._coordinator.runs.get(row.name, row) for row in rows]

    async def find(self, name: str) -> Known:
        if name in self._coordinator.runs:
            return self._coordinator.runs[name]
        row = await asyncio.to_thread(self._store.run, name)
        if row is None:
            raise Problem(404, f"no run '{name}' here: /api/runs lists those there are")
        return row

    def head(self, known: Known) -> views.Json:
        return views.live(known) if isinstance(known, Run) else views.stored(known, self.now())

    async def clients(self, known: Known) -> dict[str, views.Json]:
        if isinstance(known, Run):
            return views.clients(known)
        rows = await asyncio.to_thread(self._store.clients, known.name)
        last = await asyncio.to_thread(self._store.last_round, known.name)
        return views.stored_clients(rows, json.loads(last.record_json) if last else {})
