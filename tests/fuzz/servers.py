"""Real servers in a process of their own: what they take of memory and write to the log is theirs alone.

The process says where it listens, then the errors in its log that nobody foresaw, as lines of JSON. It ends
with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fedel_coordinator import enrolment

from tests.security.support import Pki, servers
from tests.services.coordinator.support import Federation

SECURE = "secure"
STOP_SECONDS = 20.0


class _Tracebacks(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else "-"
            _say([type(error).__name__, place])


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


async def _serve(kind: str, folder: Path) -> None:
    if kind == SECURE:
        # Or the fuzzing would be refused for its number of calls, and nothing else be tried.
        enrolment.ENROL_BURST = enrolment.RENEW_BURST = 10**9
        async with servers(folder, Pki(folder)) as made:
            _say([made.coordinator_address, made.aggregator_address, made.enrolment_address])
            await asyncio.to_thread(sys.stdin.read)
    else:
        async with Federation(folder) as plain:
            _say([plain.address, plain.aggregators[0], ""])
            await asyncio.to_thread(sys.stdin.read)


class ServerProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.coordinator = self.aggregator = self.enrolment = ""
        self.errors: list[tuple[str, str]] = []
        """Class and place of each error in the log that nobody foresaw."""

    async def listen(self) -> None:
        assert self._process.stdout is not None
        self.coordinator, self.aggregator, self.enrolment = json.loads(await self._process.stdout.readline())

    async def follow(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.errors.append(tuple(json.loads(line)))

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def megabytes(self) -> float:
        """Memory that it holds now; 0 if it is dead."""
        if not self.alive:
            return 0.0
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def started(kind: str, folder: Path) -> AsyncIterator[ServerProcess]:
    pipes: Any = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    command = (sys.executable, "-m", "tests.fuzz.servers", kind, str(folder))
    server = ServerProcess(await asyncio.create_subprocess_exec(*command, **pipes))
    following = None
    try:
        await server.listen()
        following = asyncio.ensure_future(server.follow())
        yield server
    finally:
        await server.stop()
        if following is not None:
            await following


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger().addHandler(_Tracebacks())
    asyncio.run(_serve(sys.argv[1], Path(sys.argv[2])))
