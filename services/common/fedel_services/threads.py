"""Blocking work in threads, from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run file or array work in a thread, always to its end: a caller that is cancelled is held up until then.

    So no thread goes on writing after the caller has released its lock or closed its file.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        # Marks an error of the work as seen: nobody is left to handle it.
        task.exception()
        raise
