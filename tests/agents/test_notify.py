"""What the service manager receives, on a real socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from fedel_edge.notify import Systemd, report_to_systemd

from tests.services.coordinator.support import asynchronous

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0


class Manager:
    """Listens as systemd does."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "300000"}

    async def received(self, seconds: float = PATIENCE_SECONDS) -> list[str]:
        loop = asyncio.get_running_loop()
        return (await asyncio.wait_for(loop.sock_recv(self.socket, 4096), seconds)).decode().split("\n")

    async def until(self, word: str) -> None:
        while word not in await self.received():
            pass


@asynccontextmanager
async def managed(folder: Path) -> AsyncIterator[Manager]:
    manager = Manager(folder / "notify")
    with manager.socket:
        yield manager


@asynchronous
async def test_ready_then_three_beats_per_watchdog_period(
    tmp_path: Path,
) -> None:
    async with managed(tmp_path) as manager:
        systemd = Systemd(manager.environment)
        async with report_to_systemd(systemd, lambda: "looking for home"):
            assert ["READY=1", "STATUS=looking for home"] == await manager.received()
            begin = asyncio.get_running_loop().time()
            for _ in range(4):
                assert ["WATCHDOG=1", "STATUS=looking for home"] == await manager.received()
            assert asyncio.get_running_loop().time() - begin >= 0.28
        systemd.notify(STOPPING="1")
        assert ["STOPPING=1"] == await manager.received()


@asynchronous
async def test_stuck_loop_sends_no_beats(tmp_path: Path) -> None:
    """Otherwise a process that no longer receives anything would keep its watchdog quiet."""
    async with managed(tmp_path) as manager, report_to_systemd(Systemd(manager.environment), str):
        await manager.until("READY=1")
        await manager.until("WATCHDOG=1")
        with suppress(BlockingIOError):
            while True:
                manager.socket.recv(4096)
        signal.sigtimedwait([], 0.5)  # the loop's own thread waits, as if a callback hung
        with pytest.raises(BlockingIOError):
            manager.socket.recv(4096)


def test_watchdog_of_another_process_is_ignored() -> None:
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000000"}
    assert 1.0 == Systemd(environment | {"WATCHDOG_PID": str(os.getpid())}).watchdog_seconds
    assert 0.0 == Systemd(environment | {"WATCHDOG_PID": "1"}).watchdog_seconds


@asynchronous
async def test_without_systemd_nothing_is_sent(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with report_to_systemd(Systemd({}), lambda: pytest.fail("no status is wanted")):
        assert before == asyncio.all_tasks()
        Systemd({}).notify(READY="1")
    Systemd({"NOTIFY_SOCKET": str(tmp_path / "gone")}).notify(READY="1")


@asynchronous
async def test_agent_reports_without_a_coordinator(
    tmp_path: Path,
) -> None:
    async with managed(tmp_path) as manager:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fedel_edge", "--set", "coordinator=127.0.0.1:9"),
            *("--set", f"state_dir={tmp_path / 'state'}"),
            cwd=REPOSITORY,
            env={**os.environ, **manager.environment},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            first = await manager.received()
            assert ["READY=1", "STATUS=looking for 127.0.0.1:9; tasks: 0 done, 0 failed"] == first
            await manager.until("WATCHDOG=1")
            process.send_signal(signal.SIGTERM)
            await manager.until("STOPPING=1")
            assert 0 == await asyncio.wait_for(process.wait(), PATIENCE_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
