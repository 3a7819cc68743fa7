"""A hostile agent with a certificate like any other's: every attack that we know, again and again, at once.

An attack is a coroutine that is repeated until the test ends. What a server answers is counted by attack; a
receipt for one of its updates would mean that it counted, so it is kept as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from tests.security.hostile_sessions import SessionAttacks
from tests.security.hostile_transfers import TransferAttacks

PAUSE_SECONDS = 0.02
Attack = Callable[[], Awaitable[None]]


def _name(attack: Attack) -> str:
    return getattr(attack, "__name__", "")


class Hostile(SessionAttacks, TransferAttacks):
    seconds = 0.0
    """How long it was at work."""
    _all: frozenset[str] = frozenset()
    """Its attacks by name."""
    _tasks: tuple[asyncio.Task[None], ...] = ()

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Hostile]:
        sessions = [
            self.mad_joins,
            self.unknown_runs,
            self.odd_hellos,
            self.evaluations,
            self.flood,
            self.unread,
        ]
        # A session takes the place of its older one, so these come one after the other.
        lines: list[list[Attack]] = [
            [attack for one in sessions for attack in (one, self.member)],
            [self.endless_varint, self.garbage],
            [self.uploads],
            [self.held_permit],
            [self.unread_downloads],
            [self.silent_streams],
            [self.forbidden_calls],
            [self.renewals],
        ]
        async with self._connected():
            self._all = frozenset(_name(attack) for line in lines for attack in line)
            begin = time.monotonic()
            self._tasks = tuple(asyncio.create_task(self._repeat(line)) for line in lines)
            try:
                yield self
            finally:
                ended = await _end(self._tasks)
                self.seconds = time.monotonic() - begin
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                raise AssertionError("an attack of the test is wrong") from error

    def due(self) -> set[str]:
        """What it has not done yet; raises the error of an attack that the test itself does wrong."""
        for task in self._tasks:
            if task.done():
                task.result()
        return (self._all | ({"task"} if self._joins else set())) - self.times.keys()

    async def _repeat(self, attacks: list[Attack]) -> None:
        while True:
            for attack in attacks:
                await self._answer(_name(attack), attack())
                self.times[_name(attack)] += 1
                await asyncio.sleep(PAUSE_SECONDS)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
    """Cancel them until they are over: ``wait_for`` of Python 3.11 forgets a cancellation that comes in the
    moment in which what it waits for is there, which happens on a busy machine."""
    going = set(tasks)
    while going:
        for task in going:
            task.cancel()
        _, going = await asyncio.wait(going, timeout=1.0)
    return await asyncio.gather(*tasks, return_exceptions=True)
