"""One server or agent as a process that a drill or a test may kill, freeze and start again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedel import config
from fedel.chaos import clock
from fedel.desk import child
from fedel.errors import ServiceError

START_SECONDS = 60.0
_LOOK_SECONDS = 0.01


async def until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ServiceError(f"waited {seconds:g} s without success: {what}")
        await asyncio.sleep(_LOOK_SECONDS)


class Process:
    """``python -m module`` with a configuration file; it ends when this process ends."""

    def __init__(
        self,
        module: str,
        name: str,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        user_code: Path | None = None,
        own_clock: bool = False,
    ) -> None:
        """``user_code`` is the working directory, where the process finds trainers that are not installed."""
        self._module, self.name, self._folder = module, name, folder
        self._settings, self._user_code = dict(settings), user_code
        self._clock = folder / f"{name}.clock" if own_clock else None
        self._process: subprocess.Popen[bytes] | None = None
        self._was_killed = False
        self.log = folder / f"{name}.log"
        self.lock = asyncio.Lock()
        """Held while it is being disturbed."""

    def start(self) -> None:
        if "port_file" in self._settings:
            Path(self._settings["port_file"]).unlink(missing_ok=True)
        file = self._folder / f"{self.name}.toml"
        file.write_text(config.write(self._settings), encoding="utf-8")
        words = [self._module, "--config", str(file)]
        if self._clock is not None:
            if not self._clock.exists():
                clock.write_offset(self._clock, 0.0)
            words = [clock.__name__, str(self._clock), *words]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                child.command(*words, at_the_end=signal.SIGKILL),
                cwd=self._user_code or self._folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._was_killed = False

    async def ready(self) -> None:
        """Wait until a server listens, or has ended; an agent is ready at once."""
        if "port_file" in self._settings:
            file = Path(self._settings["port_file"])
            what = f"{self.name} to listen"
            await until(lambda: file.exists() or self.returncode is not None, what, START_SECONDS)

    async def address(self) -> str:
        """Where the server listens, once it does; a restarted one listens there again."""
        await self.ready()
        file = Path(self._settings["port_file"])
        if self.returncode is not None:
            raise ServiceError(f"{self.name} did not start; the end of its log:\n{self.tail()}")
        self._settings["listen"] = file.read_text(encoding="utf-8")
        return file.read_text(encoding="utf-8")

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    @property
    def ended_by_itself(self) -> bool:
        return self.returncode is not None and not self._was_killed

    def send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As a power cut would."""
        if self._process is not None and self.returncode is None:
            self._was_killed = True
            self._process.kill()
            self._process.wait()

    def move_clock(self, seconds: float) -> None:
        assert self._clock is not None, "it was started with a clock of its own"
        clock.write_offset(self._clock, seconds)

    async def stop(self, seconds: float) -> bool:
        """Ask it to end; false if it did not within this time, and had to be killed."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            await until(lambda: self.returncode is not None, f"{self.name} to end", seconds)
        except ServiceError:
            self.kill()
            return False
        return True

    def tail(self, num_lines: int = 5) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])
