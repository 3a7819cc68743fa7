"""Closed rounds for the page: each is read once and kept in brief, for a thousand clients make a megabyte."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from fedel.types import ModelSpec
from fedel_coordinator.run import Run
from fedel_coordinator.saved import spec_from_text
from fedel_coordinator.store import RunRow, Store
from fedel_coordinator.web import views

Known = Run | RunRow
MAX_ROUNDS = 200
"""Rounds of one answer; whoever wants more asks again."""
BATCH = 20
"""Records that are in memory at once."""
MAX_RUNS = 16
"""Runs whose rounds are kept in brief."""
_ROUND = re.compile(r'\{"round": (\d+)')


class Rounds:
    """Rounds close one after the other and never change again: a round's number is its place."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, list[views.Json]] = {}
        self._reading = asyncio.Lock()

    async def brief(self, known: Known, since: int, limit: int = MAX_ROUNDS) -> list[views.Json]:
        """Without clients."""
        committed = known.state.round_num if isinstance(known, Run) else known.model_version
        async with self._reading:
            kept = self._kept.setdefault(known.name, [])
            while len(kept) < committed:
                texts = await asyncio.to_thread(self._store.records, known.name, len(kept), BATCH)
                if not texts:
                    break
                kept += await asyncio.to_thread(_briefs, texts, _spec(known))
            if len(self._kept) > MAX_RUNS:
                del self._kept[next(name for name in self._kept if name != known.name)]
        return kept[since : since + limit]

    async def of_client(
        self, known: Known, client: str, since: int, limit: int = MAX_ROUNDS
    ) -> list[views.Json]:
        """Of each round what it says of one client; nothing where the client did not count."""
        found: list[views.Json] = []
        while len(found) < limit:
            count = min(BATCH, limit - len(found))
            texts = await asyncio.to_thread(self._store.records, known.name, since + len(found), count)
            if not texts:
                break
            found += await asyncio.to_thread(_entries, texts, client)
        return found

    async def full(self, known: Known, since: int, limit: int = BATCH) -> list[views.Json]:
        """As they stand in ``rounds.jsonl``."""
        texts = await asyncio.to_thread(self._store.records, known.name, since, min(limit, BATCH))
        return await asyncio.to_thread(lambda: [json.loads(text) for text in texts])


def entry_of(text: str, client: str) -> views.Json:
    """One client's entry of a record, without reading the other thousand.

    >>> entry_of('{"round": 3, "clients": [{"client": "a", "loss": 1}, {"client": "b", "loss": 2}]}', "b")
    {'round': 3, 'client': {'client': 'b', 'loss': 2}}
    >>> entry_of('{"round": 3, "clients": []}', "b")
    {'round': 3, 'client': None}
    """
    number = _ROUND.match(text)
    assert number is not None, "records begin with their number"
    place = text.find(f'{{"client": {json.dumps(client)},')
    entry: Any = json.JSONDecoder().raw_decode(text, place)[0] if place >= 0 else None
    return {"round": int(number[1]), "client": entry}


def _entries(texts: list[str], client: str) -> list[views.Json]:
    return [entry_of(text, client) for text in texts]


def _spec(known: Known) -> ModelSpec:
    return known.spec if isinstance(known, Run) else spec_from_text(known.spec_json)


def _briefs(texts: list[str], spec: ModelSpec) -> list[views.Json]:
    tensors = [tensor.name for tensor in spec.weights]
    return [views.brief(json.loads(text), tensors) for text in texts]
