"""A whole federation of real processes on the loopback, each of which a test may kill and start again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedel.chaos.processes import Process
from fedel.chaos.proxy import Proxy
from fedel.job import RunConfig
from fedel.types import Tensors
from tests.federation.support import Watch, create_run, model_of, watching
from tests.federation.trainers import Gate

REPOSITORY = Path(__file__).parents[2]
RUN = "night-1"


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
            process = Process(module, name, folder, settings, user_code=REPOSITORY)
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
