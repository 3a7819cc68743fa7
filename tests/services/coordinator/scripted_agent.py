"""An agent that speaks the session protocol and does what a test says."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

import grpc
from grpc import aio

from fedel.roles.edge import KeptMemories, recall, run_task
from fedel.strategies import build
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.codec import memory_from_pb, profile_to_pb, report_to_pb, task_from_pb
from fedel.wire.payload import pack
from fedel.wire.protocol import PROTOCOL
from fedel.wire.retry import retrying
from fedel.wire.streams import fetch_model, push_update
from tests.strategies.fakes import FakeTrainer, spec

SPEC = spec()
STEP_SECONDS = 20.0
"""No single thing that a test waits for takes longer, unless something is wrong."""


class Dialler(Protocol):
    """The federation, as an agent sees it."""

    address: str

    def connect(self, address: str, role: str = ..., name: str = ...) -> aio.Channel: ...


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
        federation: Dialler,
        name: str,
        trainer: FakeTrainer,
        script: Mapping[int, str] | None = None,
        accuracies: Mapping[int, float] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.federation, self.name, self.trainer = federation, name, trainer
        self.script = dict(script or {})
        self.accuracies = accuracies
        self.digest = SPEC.digest
        self.hello = pb.Hello(
            client=name, device=pb.DeviceFacts(device_type="fake"), protocol=PROTOCOL, labels=labels or {}
        )
        self.mute_evaluations = False
        self.mute_offers = False
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
                await self.send(hello=self.hello)
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
        if self.mute_offers:
            return
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
                # Repeated like an agent's: the aggregator may just have been restarted.
                fetch = functools.partial(fetch_model, stub, message.run, message.model_version)
                model |= (await retrying(fetch)).tensors
            task = task_from_pb(message, SPEC)
            fallback = memory_from_pb(message.memory)
            memories = self._memories.setdefault(message.run, KeptMemories())
            memory = recall(message.accepted_round, fallback, memories)
            update = run_task(strategy, task, memory, model, self.trainer, memories)
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
