"""Work that runs beside a call."""

from __future__ import annotations

import asyncio
from typing import Any


def drop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what nobody waits for any more. It may still end with an error: a message that arrives as its call
    ends is read from a call that is over. asyncio would write the traceback of each into the log."""
    for task in tasks:
        task.add_done_callback(_overlook)
        task.cancel()


def _overlook(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
