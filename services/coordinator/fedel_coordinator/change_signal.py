"""A condition variable for asyncio: several tasks wait for a change."""

from __future__ import annotations

import asyncio


class ChangeSignal:
    """Wakes every waiting task each time something changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Set at the next change. Take it before looking at the state, so that no change is missed."""
        return self._event


def rest_seconds(least: float, spent: float) -> float:
    """How long a follower rests after it was told the news, which took ``spent`` seconds of this process: so
    each takes at most a twentieth of a core, however many clients there are."""
    return max(least, 19 * spent)


async def wait_for_event(event: asyncio.Event, timeout: float | None) -> bool:
    """Wait up to ``timeout`` seconds for the event; return whether it was set.

    Not ``asyncio.wait_for``: before Python 3.12 it loses a cancellation that comes together with the event.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=timeout)
        return event.is_set()
    finally:
        waiting.cancel()
