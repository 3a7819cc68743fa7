"""Blocking work in threads, from the event loop."""

from __future__ import annotations

import asyncio
import contextvars
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
    # Not asyncio.to_thread, which is a coroutine and would need a task of its own.
    copied = contextvars.copy_context()
    done = asyncio.get_running_loop().run_in_executor(None, copied.run, work, *arguments)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        while not done.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({done})
        # Asking for an error marks it as seen: nobody is left to handle it.
        if done.exception() is None and isinstance(result := done.result(), Closeable):
            result.close()
        raise
