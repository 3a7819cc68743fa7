"""Server-sent events of one run: how it stands now, then every change, until it is over."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from fedel_coordinator.run import ENDED, Run
from fedel_coordinator.saved import record_to_text
from fedel_coordinator.web import views
from fedel_coordinator.web.events import Events
from fedel_coordinator.web.reader import Reader
from fedel_coordinator.web.rounds import Known

REST_SECONDS = 0.25
"""A follower hears of changes at most this often."""


class Follower:
    """One listener: what it has been told, and so what is new to it."""

    def __init__(self, reader: Reader, events: Events, response: web.StreamResponse, since: int) -> None:
        self._reader, self._events, self._response = reader, events, response
        self._next_round, self._last_event = since, 0
        self._head: views.Json = {}
        self._clients: dict[str, views.Json] = {}
        self._seen_at = float("-inf")

    async def follow(self, known: Known) -> None:
        await self._response.write(b"retry: 2000\n\n")
        while True:
            change = known.news.next() if isinstance(known, Run) else asyncio.Event()
            over = known.phase in ENDED
            await self._tell_status(known)
            await self._tell_clients(known)
            await self._tell_rounds(known)
            await self._tell_events(known)
            if over:
                await self._send("end", {"phase": known.phase})
                return
            await self._rest(change)

    async def _tell_status(self, known: Known) -> None:
        head = self._reader.head(known)
        if head | {"now": 0} != self._head | {"now": 0}:
            await self._send("status", head)
        self._head = head

    async def _tell_clients(self, known: Known) -> None:
        """Those that changed; when each was last heard is told apart, because every heartbeat changes it."""
        rows = await self._reader.clients(known)
        changed = [row for name, row in rows.items() if row != self._clients.get(name)]
        if changed:
            await self._send("clients", changed)
        self._clients = rows
        now = asyncio.get_running_loop().time()
        if isinstance(known, Run) and now - self._seen_at >= self._reader.heartbeat_seconds:
            self._seen_at = now
            await self._send("seen", views.seen(known))

    async def _tell_rounds(self, known: Known) -> None:
        while records := await self._reader.rounds.brief(known, self._next_round):
            for record in records:
                self._next_round = record["round"] + 1
                await self._send("round", record, self._next_round)

    async def _tell_events(self, known: Known) -> None:
        events = self._events.since(self._last_event, known.name)
        if events:
            self._last_event = events[-1]["id"]
            await self._send("log", events)

    async def _rest(self, change: asyncio.Event) -> None:
        """Until something changed; without any change one still hears now and then who is silent."""
        try:
            await asyncio.wait_for(change.wait(), self._reader.heartbeat_seconds)
        except asyncio.TimeoutError:
            return
        await asyncio.sleep(REST_SECONDS)

    async def _send(self, kind: str, data: Any, number: int | None = None) -> None:
        identity = "" if number is None else f"id: {number}\n"
        await self._response.write(f"event: {kind}\n{identity}data: {to_text(data)}\n\n".encode())


def to_text(data: Any) -> str:
    """JSON that any reader takes: a loss that is not finite is told as null."""
    try:
        return json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return record_to_text(data)
