"""A coordinator that sends what a test wants, and an aggregator that breaks when a test wants it to.

Both are real gRPC servers on a free port of the loopback interface.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig
from grpc import aio

from fedel.job import RunConfig
from fedel.plugins import Allowed
from fedel.types import Array, Memory, Patch, Task, Update
from fedel.v1 import aggregator_pb2, aggregator_pb2_grpc, coordinator_pb2, coordinator_pb2_grpc, task_pb2
from fedel.v1.coordinator_pb2 import SessionRequest, SessionResponse
from fedel.wire.channel import SERVER_OPTIONS
from fedel.wire.codec import report_from_pb, task_to_pb
from fedel.wire.payload import digest, pack, unpack
from fedel.wire.protocol import PROTOCOL
from tests.agents import trainers
from tests.strategies.fakes import WORK, initial_model, spec

RUN = "night/1"
SPEC = spec()
PATIENCE_SECONDS = 20.0


def run_table(trainer: str = "fake", strategy: str = "fedel", **rounds: Any) -> str:
    run = RunConfig.parse(
        {"strategy": {"name": strategy}, "trainer": f"tests.agents.trainers:{trainer}", "rounds": rounds}
    )
    return json.dumps(run.table())


class Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Records everything it receives, and sends what a test pushes."""

    def __init__(self, heartbeat_seconds: float = 0.05) -> None:
        self.received: list[SessionRequest] = []
        self.sessions = 0
        self.half_closed = False
        self.protocol = PROTOCOL
        self.refuses_with = ""
        """Ends every session at its first message with these words."""
        self._heartbeat_seconds = heartbeat_seconds
        self._change = asyncio.Condition()
        self._outgoing: asyncio.Queue[SessionResponse | None] = asyncio.Queue()

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[SessionResponse]:
        self.sessions += 1
        self._outgoing = outgoing = asyncio.Queue()
        if self.refuses_with:
            await anext(requests)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuses_with)
        seconds = self._heartbeat_seconds
        self.push(welcome=coordinator_pb2.Welcome(heartbeat_seconds=seconds, protocol=self.protocol))
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while (message := await outgoing.get()) is not None:
                yield message
        finally:
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for request in requests:
            async with self._change:
                self.received.append(request)
                self._change.notify_all()
        self.half_closed = True
        self._outgoing.put_nowait(None)

    def push(self, **message: Any) -> None:
        self._outgoing.put_nowait(SessionResponse(**message))

    def hang_up(self) -> None:
        self._outgoing.put_nowait(None)

    def all(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.received if m.WhichOneof("kind") == kind]

    async def until(self, kind: str, number: int = 1, where: Callable[[Any], bool] = lambda _: True) -> Any:
        """The ``number``-th message of this kind that fits, once it has arrived."""

        def found() -> list[Any]:
            return [m for m in self.all(kind) if where(m)]

        async with self._change:
            await asyncio.wait_for(
                self._change.wait_for(lambda: len(found()) >= number), timeout=PATIENCE_SECONDS
            )
        return found()[number - 1]


class Aggregator(aggregator_pb2_grpc.AggregatorServiceServicer):
    """Serves versions and accepts updates, also resumed ones, unless a test makes it break or refuse."""

    def __init__(self, tensors: frozenset[str] = frozenset()) -> None:
        self.tensors = tensors
        self.versions: dict[int, Mapping[str, Array]] = {0: initial_model()}
        self.requests: list[aggregator_pb2.GetModelRequest] = []
        self.payloads: dict[str, bytearray] = {}
        self.headers: dict[str, aggregator_pb2.UpdateHeader] = {}
        self.bytes_received = 0
        self.break_after: list[int] = []
        """The next uploads break, each after this many chunks."""
        self.refuse_with: tuple[grpc.StatusCode, str] | None = None
        self.refusals: list[tuple[grpc.StatusCode, str]] = []
        """The next uploads are refused, each with one of these; what has arrived of them is dropped."""
        self.announce: Callable[[aggregator_pb2.ModelContent], None] = lambda _: None
        """Changes what is said about a model before it is sent."""
        self.permits = asyncio.Event()
        self.permits.set()
        self.waiting = asyncio.Event()
        self.downloads = asyncio.Event()
        self.downloads.set()
        self.asked = asyncio.Event()
        self.upload_ended = asyncio.Event()

    def mine(self, model: Mapping[str, Array]) -> dict[str, Array]:
        return {name: model[name] for name in model if not self.tensors or name in self.tensors}

    async def GetModel(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.asked.set()
        await self.downloads.wait()
        model = self.mine(self.versions[request.version])
        needed = held_of(request, tuple(self.versions[request.version]))
        model = {n: v for n, v in model.items() if n in needed and not self._same(n, v, needed[n])}
        payload = pack({name: Patch(values) for name, values in model.items()})
        content = aggregator_pb2.ModelContent(version=request.version, tensors=payload.manifest)
        self.announce(content)
        yield aggregator_pb2.GetModelResponse(content=content)
        for chunk in payload.chunks():
            yield aggregator_pb2.GetModelResponse(chunk=chunk)

    def _same(self, name: str, values: Array, have: int) -> bool:
        return have >= 0 and values.tobytes() == self.versions[have][name].tobytes()

    async def PutUpdate(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        header = (await anext(requests)).header
        if self.refuse_with is not None:
            context.set_trailing_metadata((("fedel-reason", self.refuse_with[1]),))
            await context.abort(self.refuse_with[0], "not like this")
        assert digest(header.tensors) == header.digest
        self.waiting.set()
        try:
            await self.permits.wait()
        except asyncio.CancelledError:
            self.upload_ended.set()
            raise
        stored = self.payloads.setdefault(header.digest, bytearray())
        yield aggregator_pb2.PutUpdateResponse(permit=aggregator_pb2.UploadPermit(offset=len(stored)))
        limit, chunks = self.break_after.pop(0) if self.break_after else None, 0
        async for request in requests:
            assert request.chunk.offset == len(stored)
            stored += request.chunk.data
            self.bytes_received += len(request.chunk.data)
            chunks += 1
            if chunks == limit:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the link was cut")
        if self.refusals:
            code, reason = self.refusals.pop(0)
            del self.payloads[header.digest]
            context.set_trailing_metadata((("fedel-reason", reason),))
            await context.abort(code, "not like this")
        assert len(stored) == sum(entry.num_bytes for entry in header.tensors)
        self.headers[header.digest] = header
        receipt = aggregator_pb2.UploadReceipt(digest=header.digest)
        yield aggregator_pb2.PutUpdateResponse(receipt=receipt)

    def updates(self) -> list[Update]:
        """Updates that arrived completely, in order."""
        found = []
        for key, header in self.headers.items():
            data, patches = memoryview(self.payloads[key]), {}
            for entry in header.tensors:
                piece, data = data[: entry.num_bytes], data[entry.num_bytes :]
                patches[entry.name] = unpack(entry, piece, SPEC.by_name[entry.name].shape)
            found.append(Update(patches, report_from_pb(header.report)))
        return found


def held_of(
    request: aggregator_pb2.GetModelRequest, names: Sequence[str] = tuple(SPEC.by_name)
) -> dict[str, int]:
    """The tensors that a request asks for, and the version that the agent holds of each."""
    return {names[place]: have for place, have in zip(request.tensors, request.have_versions, strict=True)}


class Federation:
    """One agent, a coordinator and aggregators."""

    def __init__(
        self,
        state_dir: Path,
        aggregators: list[Aggregator] | None = None,
        heartbeat_seconds: float = 0.05,
        **config: Any,
    ) -> None:
        self.coordinator = Coordinator(heartbeat_seconds)
        self.aggregators = aggregators or [Aggregator()]
        self.state_dir, self.config = state_dir, config
        self.addresses: list[str] = []
        self._servers: list[aio.Server] = []

    @property
    def aggregator(self) -> Aggregator:
        return self.aggregators[0]

    async def serve(self) -> None:
        self.coordinator_server, self.coordinator_address = await self._start(self.coordinator)
        for aggregator in self.aggregators:
            server, address = await self._start(aggregator)
            self._servers.append(server)
            self.addresses.append(address)

    async def _start(self, servicer: Any, address: str = "127.0.0.1:0") -> tuple[aio.Server, str]:
        server = aio.server(options=SERVER_OPTIONS)
        if isinstance(servicer, Coordinator):
            coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)
        else:
            aggregator_pb2_grpc.add_AggregatorServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port(address)
        await server.start()
        return server, f"127.0.0.1:{port}"

    async def restart_coordinator(self) -> None:
        """Stopped without a goodbye, then started at the same address without any memory."""
        await self.coordinator_server.stop(0)
        self.coordinator = Coordinator()
        self.coordinator_server, _ = await self._start(self.coordinator, self.coordinator_address)

    async def move_aggregators(self) -> None:
        """Stopped, then started at other addresses with all they have."""
        for server in self._servers:
            await server.stop(0)
        moved = [await self._start(aggregator) for aggregator in self.aggregators]
        self._servers, self.addresses = [server for server, _ in moved], [address for _, address in moved]

    async def stop(self) -> None:
        for server in (self.coordinator_server, *self._servers):
            await server.stop(0)

    def agent(self, **changes: Any) -> Agent:
        config = {
            "name": "client-1",
            "coordinator": self.coordinator_address,
            "state_dir": self.state_dir,
            "code": Allowed(("tests",)),
        }
        return Agent(AgentConfig(**{**config, **self.config, **changes}))

    def offer(self, table: str = "", instance: str = "1", model_digest: str = SPEC.digest) -> None:
        shards = [
            coordinator_pb2.Shard(address=address, tensors=sorted(a.tensors))
            for address, a in zip(self.addresses, self.aggregators, strict=True)
        ]
        offer = coordinator_pb2.RunOffer(
            run=RUN,
            config_json=table or run_table(),
            model_digest=model_digest,
            shards=shards,
            instance=instance,
        )
        self.coordinator.push(run=offer)

    async def joined(self, table: str = "", number: int = 1) -> coordinator_pb2.Join:
        """Offer the run once the agent is connected, and wait until it has joined."""
        await self.coordinator.until("hello", number)
        self.offer(table)
        join: coordinator_pb2.Join = await self.coordinator.until("join", number)
        return join

    def order(self, round_num: int, **changes: Any) -> task_pb2.Task:
        message = task_of(round_num, **changes)
        self.coordinator.push(task=message)
        return message

    async def done(self, round_num: int, number: int = 1) -> coordinator_pb2.TaskDone:
        done: coordinator_pb2.TaskDone = await self.coordinator.until(
            "done", number, lambda m: m.report.round_num == round_num
        )
        return done


def task_of(
    round_num: int,
    accepted_round: int = -1,
    memory: Memory | None = None,
    model_version: int = 0,
    budget_seconds: float = 0.15,
) -> task_pb2.Task:
    task = Task(round_num, "client-1", budget_seconds, WORK, seed=100 + round_num)
    return task_to_pb(task, RUN, SPEC, model_version, accepted_round, memory or Memory(), 60.0)


@asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[asyncio.Future[None]]:
    """The agent at work; at the end it is stopped, and must end."""
    task = asyncio.ensure_future(agent.run())
    try:
        yield task
    finally:
        agent.stop()
        await asyncio.wait_for(asyncio.shield(task), PATIENCE_SECONDS)
        with suppress(asyncio.CancelledError):
            task.cancel()


@asynccontextmanager
async def federation(folder: Path, **options: Any) -> AsyncIterator[Federation]:
    made = Federation(folder, **options)
    await made.serve()
    try:
        yield made
    finally:
        await made.stop()


def run_scenario(
    folder: Path, scenario: Callable[[Federation], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run it in a federation of its own; a trainer that it holds is released at the end."""

    async def inside() -> None:
        async with federation(folder, **options) as fed:
            await scenario(fed)

    trainers.entered.clear()
    trainers.release.clear()
    trainers.calls.clear()
    try:
        asyncio.run(inside())
    finally:
        trainers.release.set()
