"""Blocking work in threads, from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class Closeable(Protocol):
    """Holds a file open."""

    def close(self) -> None: ...


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run file or array work in a thread, always to its end: a caller that is cancelled is held up until then.

    So no thread goes on writing after the caller has released its lock or closed its file. What the work has
    opened for a caller that was cancelled is closed.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        # Asking for an error marks it as seen: nobody is left to handle it.
        if task.exception() is None and isinstance(result := task.result(), Closeable):
            result.close()
        raise
