"""Which uploads may send now: one stream per client and run, one permit per client, a few clients at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fedel.errors import UpdateRefused
from fedel_aggregator.limits import Shares


class ClientStream:
    """One client's upload; a later one of the same client takes its place."""

    def __init__(self) -> None:
        self._superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()

    def supersede(self) -> None:
        if not self._superseded.done():
            self._superseded.set_result(None)

    async def wait_for(self, work: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Wait until the work is done or the time is up; refused if another stream takes this one's place."""
        await asyncio.wait({work, self._superseded}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._superseded.done() and not work.done():
            raise UpdateRefused("superseded", "the client started this upload again on another stream")


class UploadPermits:
    """Permits to send. Waiting for one costs neither a thread nor memory. Used on the event loop only."""

    def __init__(self, max_uploads: int) -> None:
        self._permits = Shares(max_uploads, per_client=1)
        self.num_sending, self.num_waiting = 0, 0
        self._streams: dict[tuple[str, str], list[ClientStream]] = {}

    @asynccontextmanager
    async def turn(self, run: str, client: str) -> AsyncIterator[ClientStream]:
        """Be the only stream of this client: if there is an older one, end it first, because a client that
        connects again has lost its last connection."""
        mine, key = ClientStream(), (run, client)
        streams = self._streams.setdefault(key, [])
        for stream in streams:
            stream.supersede()
        streams.append(mine)
        try:
            while streams[0] is not mine:
                await streams[0].ended.wait()
            yield mine
        finally:
            mine.ended.set()
            streams.remove(mine)
            if not streams:
                del self._streams[key]

    @asynccontextmanager
    async def permit(self, client: str, stream: ClientStream) -> AsyncIterator[None]:
        """Wait for a permit, and hold it until the context ends. A client has one at a time, over all runs."""
        acquiring = asyncio.ensure_future(self._permits.acquire(client))
        try:
            self.num_waiting += 1
            try:
                await stream.wait_for(acquiring)
            finally:
                self.num_waiting -= 1
            self.num_sending += 1
            try:
                yield
            finally:
                self.num_sending -= 1
        finally:
            if acquiring.done():
                self._permits.release(client)
            else:
                acquiring.cancel()
