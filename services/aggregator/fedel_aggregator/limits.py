"""Fair shares: how much of the aggregator one client may use at a time, and how slow its streams may be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fedel.errors import UpdateRefused

RATE_SECONDS = 60.0
"""Over this time the rate of a stream is measured. Pieces of 512 KiB come in one go: a shorter time would take
a client for slow that only waits for its next piece."""


class Shares:
    """A number of places, of which one client can have only a few; others wait, in order of arrival.

    Used on the event loop only.
    """

    def __init__(self, places: int, per_client: int) -> None:
        self._all, self._per_client = asyncio.Semaphore(places), per_client
        self._own: dict[str, asyncio.Semaphore] = {}
        self._num_users: dict[str, int] = {}

    async def acquire(self, client: str) -> None:
        own = self._own.setdefault(client, asyncio.Semaphore(self._per_client))
        self._num_users[client] = self._num_users.get(client, 0) + 1
        try:
            await own.acquire()
            try:
                await self._all.acquire()
            except BaseException:
                own.release()
                raise
        except BaseException:
            self._leave(client)
            raise

    def release(self, client: str) -> None:
        self._all.release()
        self._own[client].release()
        self._leave(client)

    def _leave(self, client: str) -> None:
        self._num_users[client] -= 1
        if not self._num_users[client]:
            del self._num_users[client], self._own[client]

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[Callable[[], None]]:
        """Hold a place until the context ends. What it gives leaves the place to other clients before that."""
        await self.acquire(client)
        held = True

        def make_room() -> None:
            nonlocal held
            if held:
                held = False
                self._all.release()

        try:
            yield make_room
        finally:
            make_room()
            self._own[client].release()
            self._leave(client)


class Pace:
    """Whether a stream moves fast enough. Someone asks now and then: a timer for each message would cost more
    than reading it."""

    def __init__(self, idle_seconds: float, min_bytes_per_second: float) -> None:
        self._idle_seconds, self._min_rate = idle_seconds, min_bytes_per_second
        self.seconds = min(idle_seconds, RATE_SECONDS)
        """How often to ask."""
        self.stopped = False
        """The stream was refused: nothing more goes out."""
        self._num_messages, self._num_bytes = 0, 0
        self._messages_seen, self._bytes_measured = 0, 0
        self.start()

    def start(self) -> None:
        """The stream begins to move."""
        self._last_move = self._measured = time.monotonic()

    def moved(self, num_bytes: int) -> None:
        """A message came, or went out."""
        self._num_messages += 1
        self._num_bytes += num_bytes

    def check(self) -> None:
        """Refuse a stream that is idle or too slow."""
        now = time.monotonic()
        if self._num_messages > self._messages_seen:
            self._last_move, self._messages_seen = now, self._num_messages
        elif now - self._last_move >= self._idle_seconds:
            raise idle(self._idle_seconds)
        seconds, num_bytes = now - self._measured, self._num_bytes - self._bytes_measured
        if seconds < RATE_SECONDS:
            return
        if num_bytes < self._min_rate * seconds:
            raise UpdateRefused(
                "slow",
                f"{num_bytes} bytes in {seconds:.0f} seconds: below {self._min_rate:g} bytes per second others"
                " have their turn first; try again, an upload goes on where it broke",
            )
        self._measured, self._bytes_measured = now, self._num_bytes


def idle(seconds: float) -> UpdateRefused:
    return UpdateRefused("idle", f"the stream was idle for {seconds:g} seconds: send it again")
