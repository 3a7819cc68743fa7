"""Closed rounds for the page: those that were asked for are read once and kept in brief.

The whole record of a round with a thousand clients is a megabyte.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import msgspec

from fedel.records import ClientRecord, RoundRecord
from fedel.serialisation import from_json
from fedel.types import ModelSpec
from fedel_coordinator.run_view import ShownRun
from fedel_coordinator.store import BATCH_ROUNDS as BATCH
from fedel_coordinator.store import Store
from fedel_coordinator.web import views

MAX_ROUNDS = 200
"""Rounds in one answer; for more, send another request."""
MAX_RUNS = 16
"""Runs whose rounds are kept in brief."""
MAX_KEPT = 5000
"""Rounds of each of them."""


class Rounds:
    """Rounds close one after the other and never change again: a round's number is its place."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[tuple[str, float], dict[int, views.Json]] = {}
        """By run, and by the number of the round."""
        self._reading = asyncio.Lock()

    async def brief(self, run: ShownRun, since: int, limit: int = MAX_ROUNDS) -> list[views.Json]:
        """Without clients."""
        view = run.view()
        # A name may be used again after its run was deleted.
        key, end = (run.name, view.created_at), min(view.rounds_closed, since + limit)
        async with self._reading:
            kept = self._kept.setdefault(key, {})
            if len(kept) > MAX_KEPT:
                kept.clear()
            for number in range(since, end):
                if number not in kept:
                    count = min(BATCH, end - number)
                    texts = await asyncio.to_thread(self._store.records, run.name, number, count)
                    kept |= enumerate(await asyncio.to_thread(_briefs, texts, run.spec), number)
                if number not in kept:
                    break  # it is committed, and not closed
            if len(self._kept) > MAX_RUNS:
                del self._kept[next(other for other in self._kept if other != key)]
            return [kept[number] for number in range(since, end) if number in kept]

    async def of_client(
        self, run: ShownRun, client: str, since: int, limit: int = MAX_ROUNDS
    ) -> list[views.Json]:
        """One client's part of each round; ``None`` where it did not count."""
        found: list[views.Json] = []
        while len(found) < limit:
            count = min(BATCH, limit - len(found))
            texts = await asyncio.to_thread(self._store.records, run.name, since + len(found), count)
            if not texts:
                break
            found += await asyncio.to_thread(_entries, texts, client)
        return found

    async def full(self, run: ShownRun, since: int, limit: int = BATCH) -> list[views.Json]:
        """As in ``rounds.jsonl``."""
        texts = await asyncio.to_thread(self._store.records, run.name, since, min(limit, BATCH))
        return await asyncio.to_thread(lambda: [json.loads(text) for text in texts])


@dataclass(frozen=True)
class _Clients:
    """The part of a record that one client's history needs."""

    round: int
    clients: tuple[ClientRecord, ...]


def _entries(texts: list[str], client: str) -> list[views.Json]:
    found = []
    for text in texts:
        record = from_json(_Clients, text, "record of a round")
        entry = next((entry for entry in record.clients if entry.client == client), None)
        found.append({"round": record.round, "client": msgspec.to_builtins(entry)})
    return found


def _briefs(texts: list[str], spec: ModelSpec) -> list[views.Json]:
    tensors = [tensor.name for tensor in spec.weights]
    return [views.brief(RoundRecord.from_json(text), tensors) for text in texts]
