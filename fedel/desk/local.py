"""A federation of real processes on this machine: aggregators, coordinator and agents on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fedel import config
from fedel.desk import child
from fedel.errors import ServiceError
from fedel.job import RunConfig
from fedel.security import secret
from fedel.security.tls import Tls

START_SECONDS = 60.0
STOP_SECONDS = 10.0


@dataclass(frozen=True)
class LocalFleet:
    """The ``[fleet]`` of a job that runs on this machine."""

    slowdowns: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    """One agent per number; 3 behaves like a device three times slower than this machine."""
    num_aggregators: int = 1
    """Processes among which the model's tensors are divided."""
    threads: int = 1
    """Torch threads of an agent."""
    data: Mapping[str, Any] = field(default_factory=lambda: {"method": "dirichlet", "alpha": 0.5})
    """How the training data is split among the agents: ``method``, ``alpha``, ``seed``, ..."""

    def __post_init__(self) -> None:
        if not self.slowdowns or min(self.slowdowns) < 1 or self.num_aggregators < 1:
            raise ValueError("slowdowns: at least one number, each at least 1; num_aggregators: at least 1")


def read_job(path: Path, overrides: list[str]) -> tuple[RunConfig, LocalFleet]:
    """The two halves of a job file: the run, and the fleet for a run on this machine."""
    table = config.read(path, overrides)
    fleet = config.parse(LocalFleet, table.pop("fleet", {}), f"{path}: [fleet]")
    table.pop("code", None)  # for a federation elsewhere
    return RunConfig.parse(table, str(path)), fleet


class Federation:
    """Starts the processes and ends them; use as a context manager."""

    def __init__(
        self,
        directory: Path,
        runs_dir: Path,
        fleet: LocalFleet,
        user_code: Sequence[str] = (),
        packages: Sequence[str] = (),
    ) -> None:
        """``directory`` is for configurations, logs and state of the processes, ``runs_dir`` for results.

        ``user_code`` are folders in which the processes find the user's own models, data and methods; they run
        what is there, and installed ``packages``.
        """
        self._directory = directory
        self._runs_dir = runs_dir
        self._fleet = fleet
        self._user_code, self._packages = user_code, packages
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.tls = Tls(secret_file=str(directory / "state" / "secret"))
        """How to connect to the processes: others who use this machine do not know their secret."""
        self.coordinator = ""
        """Address of the coordinator, once it listens."""
        self.page = ""
        """Address of the live page."""

    def __enter__(self) -> Federation:
        try:
            self._start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_all(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for name in ("state", "logs", "configs"):
            (self._directory / name).mkdir(mode=0o700, exist_ok=True)
        secret.create(Path(self.tls.secret_file))
        for stale in (self._directory / "state").glob("*.address"):  # of processes that ended before
            stale.unlink()
        names = [f"aggregator-{i}" for i in range(self._fleet.num_aggregators)]
        for name in names:
            self._start(
                "fedel_aggregator",
                name,
                {
                    "listen": "127.0.0.1:0",
                    "port_file": self._port_file(name),
                    "http": "127.0.0.1:0",
                    "http_port_file": self._port_file(f"{name}-http"),
                    "data_dir": self._place(name),
                },
            )
        aggregators = [self._address(name) for name in names]
        self._start(
            "fedel_coordinator",
            "coordinator",
            {
                "listen": "127.0.0.1:0",
                "port_file": self._port_file("coordinator"),
                "http": "127.0.0.1:0",
                "http_port_file": self._port_file("coordinator-http"),
                "aggregators": aggregators,
                "database_url": f"sqlite:///{self._place('coordinator')}.db",
                "runs_dir": str(self._runs_dir),
            },
        )
        self.coordinator = self._address("coordinator")
        self.page = f"http://{self._address('coordinator-http')}"
        count = len(self._fleet.slowdowns)
        for index, slowdown in enumerate(self._fleet.slowdowns):
            name = f"agent-{index + 1}"
            self._start(
                "fedel_edge",
                name,
                {
                    "name": name,
                    "coordinator": self.coordinator,
                    "state_dir": self._place(name),
                    "slowdown": slowdown,
                    "threads": self._fleet.threads,
                    "device_type": f"1/{slowdown:g} of this machine" if slowdown > 1 else "this machine",
                    "evaluate": index == 0,
                    "data": {**self._fleet.data, "index": index, "of": count},
                },
            )

    def _place(self, name: str) -> str:
        return str(self._directory / "state" / name)

    def _port_file(self, name: str) -> str:
        return str(self._directory / "state" / f"{name}.address")

    @property
    def logs(self) -> Path:
        """Folder with the log of each process."""
        return self._directory / "logs"

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _start(self, module: str, name: str, settings: Mapping[str, Any]) -> None:
        file = self._directory / "configs" / f"{name}.toml"
        # They belong to the author of the job, who may read what this user may.
        code = {"allow": list(self._packages), "folders": list(self._user_code), "files": ["/"]}
        settings = {**settings, "code": code, "tls": {"secret_file": self.tls.secret_file}}
        file.write_text(config.write(settings), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._fleet.threads), "MALLOC_ARENA_MAX": "2"}
        with self._log(name).open("wb") as log, _uninterrupted():
            self._processes[name] = subprocess.Popen(
                child.command(module, "--config", str(file), user_code=self._user_code),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to us only; we stop the processes in order
            )

    def _address(self, name: str) -> str:
        file, deadline = Path(self._port_file(name)), time.monotonic() + START_SECONDS
        while not file.exists():
            self.check()
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"{name} did not start within {START_SECONDS:g} s; its log says why: {self._log(name)}"
                )
            time.sleep(0.02)
        return file.read_text(encoding="utf-8").strip()

    def check(self) -> None:
        """Raise an error if a process has ended by itself."""
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None:
                tail = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
                raise ServiceError(
                    f"{name} ended with exit code {code}; the end of {self._log(name)}:\n" + "\n".join(tail)
                )

    def forget_state(self) -> None:
        """Delete models, journals and profiles of the processes; logs and configurations stay."""
        shutil.rmtree(self._directory / "state", ignore_errors=True)

    async def watch(self) -> None:
        """Raise as soon as a process ends by itself."""
        while True:
            self.check()
            await asyncio.sleep(0.5)

    def stop(self) -> None:
        """End every process, agents before servers: with SIGTERM, then with SIGKILL if that takes too long."""
        for process in reversed(self._processes.values()):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until ``stop`` knows of the process that is being started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
