"""News that several tasks wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class News:
    """Wakes everybody who waits, each time something changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Set at the next change. Taken before one looks at the state, so that no change is missed."""
        return self._event

    async def until(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the condition holds, at most so many seconds; whether it does."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            event = self.next()
            if holds():
                return True
            left = None if deadline is None else deadline - loop.time()
            try:
                await asyncio.wait_for(event.wait(), left)
            except asyncio.TimeoutError:
                return holds()
