"""A whole federation on the loopback, in this process; and following a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as serve_aggregator
from fedel_aggregator.servicer import Aggregator
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.server import serve as serve_coordinator
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig
from safetensors.numpy import load_file

from fedel.chaos.proxy import Proxy
from fedel.desk.submit import create, follow, save_model
from fedel.job import RunConfig
from fedel.plugins import Allowed
from fedel.records import RoundRecord
from fedel.simulation.conditions import Faults
from fedel.training.settings import DataPart
from fedel.types import Tensors
from fedel.v1 import coordinator_pb2 as pb
from tests.agents.stand_ins import running
from tests.federation.trainers import clients_of, memory_share_of, scale_of, spec_of
from tests.simulation.history import History, play_run
from tests.strategies.fakes import WORK, initial_model

PATIENCE_SECONDS = 60.0
"""A test that waits longer for one thing has failed."""
_LOOK_SECONDS = 0.01
OWN = Allowed(("tests", "own_method"))
"""What jobs of tests may run."""


async def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s without success: {what}"
        await asyncio.sleep(_LOOK_SECONDS)


def job_of(
    strategy: dict[str, Any],
    num_clients: int,
    num_rounds: int = 3,
    seed: int = 5,
    trainer: str = "uneven",
    work: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    budget: dict[str, Any] | None = None,
    **rounds: Any,
) -> RunConfig:
    """A job for the uneven fleet."""
    table = {
        "seed": seed,
        "strategy": strategy,
        "workload": {"model": "fake", "data": "fake", "model_options": options or {}},
        "rounds": {"num_rounds": num_rounds, "min_clients": num_clients, "evaluate_every": 0, **rounds},
        "budget": {"pace": "plan", **(budget or {})},
        "work": asdict(WORK) | (work or {}),
        "trainer": f"tests.federation.trainers:{trainer}",
    }
    return RunConfig.parse(table)


def simulated(job: RunConfig, num_clients: int, faults: Faults | None = None) -> History:
    """The same run on the same fleet in the simulation."""
    return play_run(job, clients_of(num_clients, scale_of(job), memory_share_of(job)), faults=faults)


async def create_run(address: str, run: str, job: RunConfig) -> None:
    spec = spec_of(scale_of(job))
    await create(address, run, job, spec, initial_model(spec))


async def model_of(address: str, run: str, folder: Path, version: int = -1) -> Tensors:
    """The run's newest model, or another version, as a user would fetch it."""
    path = folder / f"{run}.safetensors"
    await save_model(address, run, path, version=version)
    return load_file(path)


class Watch:
    """Follows a run, also across restarts of its coordinator."""

    def __init__(self, address: str, run: str) -> None:
        self.run = run
        self.status = pb.RunStatus()
        self.records: list[RoundRecord] = []
        """Of the rounds closed so far."""
        self._following = asyncio.ensure_future(follow(address, run, self._show))

    def _show(self, status: pb.RunStatus) -> None:
        self.status = status
        self.records += [RoundRecord.from_json(text) for text in status.rounds_json]

    @property
    def counted(self) -> list[list[str]]:
        """Whose updates counted, by round."""
        return [[entry.client for entry in record.clients] for record in self.records]

    def done(self, round_num: int) -> set[str]:
        """Clients that are done with this round, while it is open."""
        if self.status.round_num != round_num:
            return set()
        return {client.client for client in self.status.clients if client.phase == "done"}

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until the condition holds; the run must not end before."""
        await until(lambda: condition() or self._following.done(), f"{what}, in run '{self.run}'", seconds)
        assert condition(), f"run '{self.run}' ended before {what}: {self.status}"

    async def ended(self) -> pb.RunStatus:
        await until(self._following.done, f"the end of run '{self.run}'")
        return self._following.result()

    async def finished(self) -> None:
        """Wait for the end; the run must have finished."""
        last = await self.ended()
        assert pb.RUN_PHASE_FINISHED == last.phase, last.message

    async def close(self) -> None:
        self._following.cancel()
        with suppress(asyncio.CancelledError):
            await self._following


@asynccontextmanager
async def watching(address: str, run: str) -> AsyncIterator[Watch]:
    watch = Watch(address, run)
    try:
        yield watch
    finally:
        await watch.close()


@dataclass(frozen=True)
class Servers:
    address: str
    """The coordinator's."""
    aggregators: tuple[Aggregator, ...]
    proxy: Proxy
    """Between all others and the first aggregator."""


@asynccontextmanager
async def servers(folder: Path, num_aggregators: int = 1) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        addresses, aggregators = [], []
        for index in range(num_aggregators):
            data_dir = folder / f"aggregator-{index}"
            config = AggregatorConfig(listen="127.0.0.1:0", data_dir=data_dir, keep_updates=-1, code=OWN)
            address, aggregator = await stack.enter_async_context(serve_aggregator(config))
            addresses.append(address)
            aggregators.append(aggregator)
        proxy = await stack.enter_async_context(Proxy(addresses[0]))
        coordinator = CoordinatorConfig(
            listen="127.0.0.1:0",
            aggregators=tuple(addresses),
            public_aggregators=(proxy.address, *addresses[1:]),
            database_url=f"sqlite:///{folder / 'coordinator.db'}",
            code=OWN,
        )
        address, _ = await stack.enter_async_context(serve_coordinator(coordinator))
        yield Servers(address, tuple(aggregators), proxy)


@asynccontextmanager
async def agents(folder: Path, address: str, indices: range, num_clients: int) -> AsyncIterator[list[Agent]]:
    """Some of the clients, in this process."""
    async with AsyncExitStack() as stack:
        made = []
        for index in indices:
            name = f"client-{index}"
            part = DataPart(index, num_clients)
            config = AgentConfig(
                address,
                name,
                folder / name,
                data=part,
                evaluate=index == 0,
                code=OWN,
            )
            made.append(Agent(config))
            await stack.enter_async_context(running(made[-1]))
        yield made
