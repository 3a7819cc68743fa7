"""Server-sent events of one run: its current state, then every change, until it is over."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from fedel.serialisation import to_json
from fedel_coordinator.change_signal import rest_seconds, wait_for_event
from fedel_coordinator.run_view import ShownRun
from fedel_coordinator.web import views
from fedel_coordinator.web.events import Events
from fedel_coordinator.web.reader import Reader

REST_SECONDS = 0.25
"""A follower receives changes at most this often."""


class Follower:
    """One listener: what it has received, and so what is new to it."""

    def __init__(self, reader: Reader, events: Events, response: web.StreamResponse, since: int) -> None:
        self._reader, self._events, self._response = reader, events, response
        self._next_round, self._last_event = since, 0
        self._head: views.Json = {}
        self._clients: dict[str, views.Json] = {}
        self._seen_at = float("-inf")
        self._rest_seconds = REST_SECONDS

    async def follow(self, run: ShownRun) -> None:
        await self._response.write(b"retry: 2000\n\n")
        while True:
            change = run.change.next()
            ended = run.ended
            await self._send_status(run)
            await self._send_clients(run)
            await self._send_rounds(run)
            await self._send_events(run)
            if ended:
                await self._send("end", {"phase": run.view().phase})
                return
            await self._rest(change)

    async def _send_status(self, run: ShownRun) -> None:
        head = self._reader.head(run)
        if head | {"now": 0} != self._head | {"now": 0}:
            await self._send("status", head)
        self._head = head

    async def _send_clients(self, run: ShownRun) -> None:
        """Those that changed; when each was last heard is sent apart, because every heartbeat changes it."""
        begin = time.thread_time()
        rows = await self._reader.clients(run)
        changed = [row for name, row in rows.items() if row != self._clients.get(name)]
        self._rest_seconds = rest_seconds(REST_SECONDS, time.thread_time() - begin)
        if changed:
            await self._send("clients", changed)
        self._clients = rows
        now = asyncio.get_running_loop().time()
        if not run.ended and now - self._seen_at >= self._reader.heartbeat_seconds:
            self._seen_at = now
            await self._send("seen", await self._reader.last_heard(run))

    async def _send_rounds(self, run: ShownRun) -> None:
        while records := await self._reader.rounds.brief(run, self._next_round):
            for record in records:
                self._next_round = record["round"] + 1
                await self._send("round", record, self._next_round)

    async def _send_events(self, run: ShownRun) -> None:
        events = self._events.since(self._last_event, run.name)
        if events:
            self._last_event = events[-1]["id"]
            await self._send("log", events)

    async def _rest(self, change: asyncio.Event) -> None:
        """Until something changed; from time to time anyway, because silence grows without any change."""
        if await wait_for_event(change, self._reader.heartbeat_seconds):
            await asyncio.sleep(self._rest_seconds)

    async def _send(self, kind: str, data: Any, number: int | None = None) -> None:
        identity = "" if number is None else f"id: {number}\n"
        await self._response.write(f"event: {kind}\n{identity}data: {to_json(data)}\n\n".encode())
