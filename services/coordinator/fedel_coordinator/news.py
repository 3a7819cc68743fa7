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
        late = False

        def expire() -> None:
            nonlocal late
            late = True
            self.notify()

        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes together with news.
        timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, expire)
        try:
            while True:
                event = self.next()
                if holds():
                    return True
                if late:
                    return False
                await event.wait()
        finally:
            if timer is not None:
                timer.cancel()
