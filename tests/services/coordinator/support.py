"""A federation in one process: real aggregators, a coordinator that can be restarted, scripted agents."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as serve_aggregator
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.run import CoordinatorRun
from fedel_coordinator.server import serve
from grpc import aio

from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.roles.sharding import assign
from fedel.types import Tensors
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.codec import spec_to_pb
from fedel.wire.streams import fetch_model, model_header, push_model
from fedel.wire.watch import whole
from tests.services.coordinator.scripted_agent import SPEC, STEP_SECONDS, ScriptedAgent
from tests.strategies.fakes import WORK, FakeTrainer, initial_model
from tests.strategies.fakes import fleet as uneven_trainers

RUN = "night-1"


def asynchronous(test: Callable[..., Any]) -> Callable[..., None]:
    """Let pytest run a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


def run_config(strategy: Mapping[str, Any] | None = None, **rounds: Any) -> RunConfig:
    return RunConfig.parse(
        {
            "seed": 1,
            "strategy": dict(strategy or {"name": "fedel"}),
            "rounds": {"num_rounds": 3, "min_clients": 3, "deadline_floor_seconds": 60.0} | rounds,
            "budget": {"pace": "plan"},
            "work": asdict(WORK),
        }
    )


async def until(condition: Callable[[], bool], run: CoordinatorRun) -> None:
    """Wait until the condition on a run holds."""

    async def wait() -> None:
        while True:
            change = run.change.next()
            if condition():
                return
            await change.wait()

    await asyncio.wait_for(wait(), STEP_SECONDS)


class Federation:
    """Aggregators and a coordinator on free ports, everything they keep under one folder."""

    def __init__(self, folder: Path, num_aggregators: int = 1, **settings: Any) -> None:
        self.folder = folder
        self.num_aggregators = num_aggregators
        self.settings = {
            "database_url": f"sqlite:///{folder}/coordinator.db",
            "heartbeat_seconds": 1.0,
            "silent_heartbeats": 60.0,  # the scripted agents send no heartbeats
        } | settings
        self.address = ""
        self.coordinator: Coordinator
        self.aggregators: list[str] = []
        self.agents: list[ScriptedAgent] = []
        self._aggregating = [AsyncExitStack() for _ in range(num_aggregators)]
        self._serving = AsyncExitStack()

    async def __aenter__(self) -> Federation:
        for i in range(self.num_aggregators):
            self.aggregators.append("127.0.0.1:0")
            self.aggregators[i] = await self.start_aggregator(i)
        await self.start_coordinator()
        return self

    async def __aexit__(self, *_: object) -> None:
        for agent in self.agents:
            await agent.drop()
        await self.stop_coordinator()
        for i in range(self.num_aggregators):
            await self.stop_aggregator(i)

    def connect(self, address: str, role: str = "operator", name: str = "op") -> aio.Channel:
        """A channel to one of the servers, for somebody; in plain text all are the same."""
        return connect(address)

    async def start_aggregator(self, i: int = 0, folder: str = "") -> str:
        """On the address that it had before, if it had one."""
        data_dir = self.folder / (folder or f"aggregator-{i}")
        config = AggregatorConfig(listen=self.aggregators[i], data_dir=data_dir)
        address, _ = await self._aggregating[i].enter_async_context(serve_aggregator(config))
        return address

    async def stop_aggregator(self, i: int = 0) -> None:
        await self._aggregating[i].aclose()

    @property
    def config(self) -> CoordinatorConfig:
        return CoordinatorConfig(listen="127.0.0.1:0", aggregators=tuple(self.aggregators), **self.settings)

    async def start_coordinator(self, **parts: Any) -> None:
        self.address, self.coordinator = await self._serving.enter_async_context(serve(self.config, **parts))
        self.channel = await self._serving.enter_async_context(connect(self.address))
        self.stub = CoordinatorServiceStub(self.channel)

    async def stop_coordinator(self) -> None:
        await self._serving.aclose()

    async def restart_coordinator(self) -> None:
        """A new coordinator on the same database; the agents come back to it."""
        agents = list(self.agents)
        for agent in agents:
            await agent.drop()
        await self.stop_coordinator()
        await self.start_coordinator()
        for agent in agents:
            agent.start()

    async def create(self, config: RunConfig, run: str = RUN) -> pb.RunStatus:
        """Send the first model to the aggregators, then create the run."""
        model = initial_model()
        header = model_header(run, config.strategy, SPEC, config.rounds.keep_every, config.rounds.late)
        for address, names in zip(self.aggregators, assign(SPEC, len(self.aggregators)), strict=True):
            async with self.connect(address) as channel:
                await push_model(AggregatorServiceStub(channel), header, {name: model[name] for name in names})
        return await self.ask_for(config, run)

    async def ask_for(self, config: RunConfig, run: str = RUN, spec: Any = SPEC) -> pb.RunStatus:
        request = pb.CreateRunRequest(run=run, config_json=json.dumps(config.table()), spec=spec_to_pb(spec))
        return (await self.stub.CreateRun(request)).status

    def agent(self, name: str, trainer: FakeTrainer | None = None, **script: Any) -> ScriptedAgent:
        agent = ScriptedAgent(self, name, trainer or trainers()[name], **script)
        self.agents.append(agent)
        return agent.start()

    def start_agents(self, count: int = 3, **script: Any) -> list[ScriptedAgent]:
        return [self.agent(name, **script) for name in list(trainers())[:count]]

    async def control(self, action: pb.RunAction.ValueType, run: str = RUN) -> pb.RunStatus:
        return (await self.stub.ControlRun(pb.ControlRunRequest(run=run, action=action))).status

    async def status(self, wanted: Callable[[pb.RunStatus], bool], run: str = RUN) -> pb.RunStatus:
        """Follow the run until its status is as wanted."""

        async def follow() -> pb.RunStatus:
            async for status in whole(self.stub.WatchRun(pb.WatchRunRequest(run=run))):
                if wanted(status):
                    return status
            raise AssertionError("the run ended without it")

        return await asyncio.wait_for(follow(), STEP_SECONDS)

    async def finished(self, run: str = RUN) -> list[RoundRecord]:
        """Wait for the end of the run; its records."""
        records: list[RoundRecord] = []

        async def follow() -> None:
            async for status in whole(self.stub.WatchRun(pb.WatchRunRequest(run=run))):
                records.extend(RoundRecord.from_json(text) for text in status.rounds_json)

        await asyncio.wait_for(follow(), STEP_SECONDS)
        return records

    async def until_lost(self, client: str, why: str, run: str = RUN) -> str:
        """Wait until the open round does not wait for a client any more, for this reason; the whole reason."""
        live = self.coordinator.runs[run]

        def reason() -> str:
            return live.state.open.lost.get(client, "") if live.state.open else ""

        await until(lambda: why in reason(), live)
        return reason()

    def refused(self, reason: str) -> float:
        """Agents' messages that the coordinator refused for a reason."""
        return self.coordinator.metrics.refused.labels(reason)._value.get()

    async def model(self, run: str = RUN, version: int = -1) -> Tensors:
        model: dict[str, Any] = {}
        for address in self.aggregators:
            async with self.connect(address) as channel:
                model |= (await fetch_model(AggregatorServiceStub(channel), run, version)).tensors
        return {t.name: model[t.name] for t in SPEC.tensors}


def trainers(count: int = 6) -> dict[str, FakeTrainer]:
    return uneven_trainers(count)
