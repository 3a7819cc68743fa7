"""A whole federation of real processes on the loopback, each of which a test may kill and start again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedel import config
from fedel.cli import child
from fedel.job import RunConfig
from fedel.types import Tensors
from tests.federation.proxy import Proxy
from tests.federation.support import Watch, create_run, model_of, until, watching
from tests.federation.trainers import Gate

REPOSITORY = Path(__file__).parents[2]
RUN = "night-1"


class Process:
    """One server or agent: ``python -m module`` with a configuration file."""

    def __init__(self, module: str, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._module, self.name, self._folder = module, name, folder
        self._settings = dict(settings)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        file = self._folder / f"{self.name}.toml"
        file.write_text(config.write(self._settings), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                child.command(self._module, "--config", str(file), at_the_end=signal.SIGKILL),
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def address(self) -> str:
        """Where the server listens, once it does; a restarted one listens there again."""
        file = Path(self._settings["port_file"])
        await until(lambda: file.exists() or self.returncode is not None, f"{self.name} to listen")
        assert self.returncode is None, (self._folder / f"{self.name}.log").read_text()
        self._settings["listen"] = file.read_text()
        return file.read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Federation:
    """The processes of a federation, and one run on it."""

    folder: Path
    address: str
    coordinator: Process
    aggregator: Process
    agents: tuple[Process, ...]
    proxy: Proxy
    """Between the agents and the aggregator."""
    watch: Watch

    async def model(self) -> Tensors:
        return await model_of(self.address, RUN, self.folder)


@asynccontextmanager
async def federation(
    folder: Path, job: RunConfig, num_clients: int, heartbeat_seconds: float = 5.0
) -> AsyncIterator[Federation]:
    async with AsyncExitStack() as stack:

        def started(module: str, name: str, settings: Mapping[str, Any]) -> Process:
            process = Process(module, name, folder, settings)
            stack.callback(process.kill)
            process.start()
            return process

        aggregator = started(
            "fedel_aggregator",
            "aggregator",
            {"listen": "127.0.0.1:0", "port_file": str(folder / "a.address"), "data_dir": str(folder / "a")},
        )
        bulk = await aggregator.address()
        proxy = await stack.enter_async_context(Proxy(bulk))
        coordinator = started(
            "fedel_coordinator",
            "coordinator",
            {
                "listen": "127.0.0.1:0",
                "port_file": str(folder / "c.address"),
                "aggregators": [bulk],
                "public_aggregators": [proxy.address],
                "database_url": f"sqlite:///{folder / 'coordinator.db'}",
                "heartbeat_seconds": heartbeat_seconds,
            },
        )
        address = await coordinator.address()
        await create_run(address, RUN, job)
        agents = [
            started(
                "fedel_edge",
                f"client-{index}",
                {
                    "coordinator": address,
                    "name": f"client-{index}",
                    "state_dir": str(folder / f"client-{index}"),
                    "data": {"index": index, "of": num_clients},
                    "code": {"allow": ["tests"]},
                },
            )
            for index in range(num_clients)
        ]
        watch = await stack.enter_async_context(watching(address, RUN))
        yield Federation(folder, address, coordinator, aggregator, tuple(agents), proxy, watch)


def gate_of(job: RunConfig) -> Gate:
    return Gate(Path(job.workload.model_options["gate"]), job.seed)
