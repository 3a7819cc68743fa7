"""One reading of a model for all clients that fetch it at the same time.

A round begins with all of them fetching the same version, at about the same pace. What one of them needs, the
others have just needed or will need in a moment: it is read and encoded once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from fedel_services.threads import in_thread

NUM_KEPT = 6
"""Readings that are kept for those that come later; each has 1 MiB."""


class SharedReads:
    """The last readings of a process. Used on the event loop only."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, asyncio.Future[list[bytes]]] = {}
        self.num_read = 0
        """How often something was really read."""

    async def get(self, key: Hashable, read: Callable[[], list[bytes]]) -> list[bytes]:
        """What ``read`` returns, or returned for the same key a moment ago. It runs in a thread."""
        while (shared := self._kept.get(key)) is not None:
            await asyncio.wait({shared})
            # Who began to read may have failed, or its caller may have hung up: then it is this one's turn.
            if not shared.cancelled():
                return shared.result()
        mine = self._kept[key] = asyncio.get_running_loop().create_future()
        if len(self._kept) > NUM_KEPT:
            del self._kept[next(iter(self._kept))]
        try:
            self.num_read += 1
            messages = await in_thread(read)
        except BaseException:
            mine.cancel()
            if self._kept.get(key) is mine:
                del self._kept[key]
            raise
        mine.set_result(messages)
        return messages
