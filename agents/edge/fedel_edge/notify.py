"""Report to systemd that the agent is ready, alive or stopping (sd_notify). Without systemd nothing is sent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

_BEATS = 3
"""Signs of life per watchdog period; one may be lost without harm."""
_STATUS_SECONDS = 10.0
"""How often the status line is sent where there is no watchdog."""


class Systemd:
    """The service manager's socket, if one started this process."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for Linux' abstract namespace, whose names start with a zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_seconds = int(environment.get("WATCHDOG_USEC", "0")) / 1e6 if ours else 0.0

    def __bool__(self) -> bool:
        return bool(self._address)

    def notify(self, **facts: str) -> None:
        """Send facts such as ``READY="1"``. Never waits: what the manager cannot take now is lost."""
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
async def report_to_systemd(systemd: Systemd, status: Callable[[], str]) -> AsyncIterator[None]:
    """Ready on entering, and alive as long as this event loop runs its tasks."""
    if not systemd:
        yield
        return
    systemd.notify(READY="1", STATUS=status())
    beating = asyncio.ensure_future(_beat(systemd, status))
    try:
        yield
    finally:
        beating.cancel()


async def _beat(systemd: Systemd, status: Callable[[], str]) -> None:
    period_seconds = systemd.watchdog_seconds / _BEATS or _STATUS_SECONDS
    while True:
        systemd.notify(WATCHDOG="1", STATUS=status())
        await asyncio.sleep(period_seconds)
