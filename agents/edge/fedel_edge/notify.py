"""Tell systemd how the agent fares: ready, alive, stopping (sd_notify). Without systemd nothing is told."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

_BEATS = 3
"""How often in a watchdog's time the agent shows that it is alive; a lost beat is no death."""
_STATUS_SECONDS = 10.0
"""How often the status line is told where no watchdog asks."""


class Systemd:
    """The socket on which the service manager listens, if one started this process."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ means Linux' abstract namespace, which has a zero byte there.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_seconds = int(environment.get("WATCHDOG_USEC", "0")) / 1e6 if ours else 0.0

    def __bool__(self) -> bool:
        return bool(self._address)

    def tell(self, **facts: str) -> None:
        """Such as ``READY="1"``. A manager that cannot take it now loses it; the agent does not wait."""
        if not self._address:
            return
        message = "\n".join(f"{key}={value}" for key, value in facts.items())
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
            suppress(OSError),
        ):
            sender.setblocking(False)
            sender.sendto(message.encode(), self._address)


@asynccontextmanager
async def told(systemd: Systemd, status: Callable[[], str]) -> AsyncIterator[None]:
    """Ready on entering, and alive for as long as this event loop gets to run its tasks."""
    if not systemd:
        yield
        return
    systemd.tell(READY="1", STATUS=status())
    beating = asyncio.ensure_future(_beat(systemd, status))
    try:
        yield
    finally:
        beating.cancel()


async def _beat(systemd: Systemd, status: Callable[[], str]) -> None:
    every = systemd.watchdog_seconds / _BEATS or _STATUS_SECONDS
    while True:
        systemd.tell(WATCHDOG="1", STATUS=status())
        await asyncio.sleep(every)
