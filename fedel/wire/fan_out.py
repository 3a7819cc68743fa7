"""The same call to several servers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def fan_out(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. When one call fails, or this is cancelled, the others are cancelled and have ended
    before the error is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
