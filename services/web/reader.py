"""Finds runs and tells of them, whether this process drives them or they ended before it began."""

from __future__ import annotations

import asyncio
import json

from fedel.types import ModelSpec
from services.coordinator.coordinator import Coordinator
from services.coordinator.run import Run
from services.coordinator.saved import spec_from_text
from services.coordinator.store import RunRow
from services.web import views
from services.web.server import Problem

MAX_ROUNDS = 200
"""Rounds that are read at once."""
Known = Run | RunRow


class Reader:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._store = coordinator, coordinator.store

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

    async def rounds(
        self, known: Known, since: int, limit: int = MAX_ROUNDS, client: str = "", full: bool = False
    ) -> list[views.Json]:
        """Closed rounds from ``since`` on; in brief, unless they are wanted in full."""
        if isinstance(known, Run) and known.state.round_num <= since:
            return []
        texts = await asyncio.to_thread(self._store.records, known.name, since, limit)
        return await asyncio.to_thread(_parsed, texts, None if full else _spec(known), client)


def _spec(known: Known) -> ModelSpec:
    return known.spec if isinstance(known, Run) else spec_from_text(known.spec_json)


def _parsed(texts: list[str], spec: ModelSpec | None, client: str) -> list[views.Json]:
    if spec is None:
        return [json.loads(text) for text in texts]
    tensors = [tensor.name for tensor in spec.weights]
    return [views.brief(json.loads(text), tensors, client) for text in texts]
