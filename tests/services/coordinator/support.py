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

import grpc
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as serve_aggregator
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.run import CoordinatorRun
from fedel_coordinator.server import serve
from grpc import aio

from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.roles.edge import KeptMemories, run_task
from fedel.roles.sharding import assign
from fedel.strategies import build
from fedel.types import Tensors
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.codec import memory_from_pb, profile_to_pb, report_to_pb, spec_to_pb, task_from_pb
from fedel.wire.payload import pack
from fedel.wire.retry import retrying
from fedel.wire.streams import fetch_model, model_header, push_model, push_update
from fedel.wire.watch import whole
from tests.strategies.fakes import WORK, FakeTrainer, initial_model, spec
from tests.strategies.fakes import fleet as uneven_trainers

SPEC = spec()
RUN = "night-1"
STEP_SECONDS = 20.0
"""No single thing that a test waits for takes longer, unless something is wrong."""


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


class Heard:
    """The messages received so far, for tests that wait for one."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._arrived = asyncio.Event()

    def add(self, message: Any) -> None:
        self.all.append(message)
        self._arrived.set()

    async def until(self, wanted: Callable[[Any], bool], number: int = 1) -> Any:
        """The n-th message that is wanted."""

        async def find() -> Any:
            while True:
                self._arrived.clear()
                found = [message for message in self.all if wanted(message)]
                if len(found) >= number:
                    return found[number - 1]
                await self._arrived.wait()

        return await asyncio.wait_for(find(), STEP_SECONDS)


class ScriptedAgent:
    """Speaks the session protocol, trains with a fake, really uploads; ``script`` says what it does otherwise.

    ``script[round]`` is ``silent`` (takes the task, does nothing), ``decline``, ``fail``, ``upload`` (uploads
    but never says so) or ``half`` (the same, only to the first aggregator). ``hold`` keeps every task back
    until the event is set.
    """

    def __init__(
        self,
        federation: Federation,
        name: str,
        trainer: FakeTrainer,
        script: Mapping[int, str] | None = None,
        accuracies: Mapping[int, float] | None = None,
    ) -> None:
        self.federation, self.name, self.trainer = federation, name, trainer
        self.script = dict(script or {})
        self.accuracies = accuracies
        self.digest = SPEC.digest
        self.mute_evaluations = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.uploaded = asyncio.Event()
        self.heard = Heard()
        self.error: grpc.StatusCode | None = None
        self.why = ""
        self._runs: dict[str, pb.RunOffer] = {}
        self._memories: dict[str, KeptMemories] = {}
        self._call: Any = None
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[None]] = set()

    def start(self) -> ScriptedAgent:
        self._task = asyncio.create_task(self._session())
        return self

    async def drop(self) -> None:
        """The network breaks: nobody says goodbye."""
        for task in [self._task, *self._work]:
            if task is not None:
                task.cancel()
        if self._call is not None:
            self._call.cancel()
        await asyncio.gather(*[t for t in (self._task, *self._work) if t], return_exceptions=True)

    async def leave(self) -> None:
        """Say goodbye and wait until the coordinator has received it."""
        await self._call.done_writing()
        await asyncio.wait_for(asyncio.gather(self._task, return_exceptions=True), STEP_SECONDS)

    async def send(self, **message: Any) -> None:
        async with self._sending:
            await self._call.write(pb.SessionRequest(**message))

    async def _session(self) -> None:
        async with self.federation.connect(self.federation.address, "agent", self.name) as channel:
            self._call = CoordinatorServiceStub(channel).Session()
            try:
                await self.send(hello=pb.Hello(client=self.name, device=pb.DeviceFacts(device_type="fake")))
                async for message in self._call:
                    self._follow(message)
                    self.heard.add(message)
            except aio.AioRpcError as error:
                self.error, self.why = error.code(), error.details() or ""

    def _follow(self, message: pb.SessionResponse) -> None:
        kind = message.WhichOneof("kind")
        act = {"run": self._join, "task": self._train, "evaluate": self._evaluate}.get(kind or "")
        if act is not None:
            task = asyncio.create_task(act(getattr(message, kind)))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def _join(self, offer: pb.RunOffer) -> None:
        self._runs[offer.run] = offer
        await self.send(
            join=pb.Join(
                run=offer.run,
                model_digest=self.digest,
                num_samples=self.trainer.num_samples,
                profile=profile_to_pb(self.trainer.profile),
                can_evaluate=self.accuracies is not None,
            )
        )

    async def _train(self, message: Any) -> None:
        key = {"run": message.run, "round_num": message.round_num}
        act = self.script.get(message.round_num, "")
        if act == "decline":
            await self.send(answer=pb.TaskAnswer(**key, accepted=False, reason="too hot"))
        elif act == "fail":
            await self.send(failed=pb.TaskFailed(**key, message="out of memory"))
        elif act != "silent":
            await self.hold.wait()
            await self._train_and_upload(message, act)

    async def _train_and_upload(self, message: Any, act: str) -> None:
        offer = self._runs[message.run]
        strategy = build(json.loads(offer.config_json)["strategy"])
        model: dict[str, Any] = {}
        async with AsyncExitStack() as stack:
            dialled = [self.federation.connect(shard.address, "agent", self.name) for shard in offer.shards]
            channels = [await stack.enter_async_context(channel) for channel in dialled]
            stubs = [AggregatorServiceStub(channel) for channel in channels]
            for stub in stubs:
                model |= (await fetch_model(stub, message.run, message.model_version)).tensors
            task = task_from_pb(message, SPEC)
            fallback = memory_from_pb(message.memory)
            memories = self._memories.setdefault(message.run, KeptMemories())
            update = run_task(strategy, task, message.accepted_round, fallback, model, self.trainer, memories)
            num_bytes = 0
            for stub, shard in list(zip(stubs, offer.shards, strict=True))[: 1 if act == "half" else None]:
                mine = {n: p for n, p in update.patches.items() if not shard.tensors or n in shard.tensors}
                payload = pack(mine)
                num_bytes += payload.num_bytes
                # Repeated like an agent's: the round may not be open at the aggregator yet.
                await retrying(functools.partial(push_update, stub, message.run, update.report, payload))
        self.uploaded.set()
        if act not in ("upload", "half"):
            phases = pb.PhaseSeconds(download=0.5, train=2.0, upload=1.0)
            done = pb.TaskDone(
                run=message.run,
                report=report_to_pb(update.report),
                phases=phases,
                bytes_up=num_bytes,
                bytes_down=7,
            )
            await self.send(done=done)

    async def _evaluate(self, message: pb.EvaluationTask) -> None:
        if self.mute_evaluations:
            return
        accuracy = (self.accuracies or {}).get(message.model_version)
        if accuracy is None:
            await self.send(failed=pb.TaskFailed(run=message.run, round_num=-1, message="no test data"))
            return
        result = pb.EvaluationDone(
            run=message.run,
            model_version=message.model_version,
            accuracy=accuracy,
            loss=1 - accuracy,
            num_samples=10,
            seconds=0.25,
        )
        await self.send(evaluation=result)

    def kinds(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.heard.all if m.WhichOneof("kind") == kind]

    async def until(self, kind: str, number: int = 1, **fields: Any) -> Any:
        """The n-th message of a kind whose fields have these values."""

        def wanted(message: pb.SessionResponse) -> bool:
            if message.WhichOneof("kind") != kind:
                return False
            inner = getattr(message, kind)
            return all(getattr(inner, name) == value for name, value in fields.items())

        return getattr(await self.heard.until(wanted, number), kind)


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
