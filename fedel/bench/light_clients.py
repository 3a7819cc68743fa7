"""Clients that train nothing: each holds a session of its own, and answers every task with a ready update.

They cost the machine little, so that a thousand of them load two servers. A process holds many:
``python -m fedel.bench.light_clients`` reads what to do as JSON and writes a line for every round that closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from grpc import aio

from fedel.bench.made_up import made_up_model, made_up_profile, made_up_spec
from fedel.types import Patch, Report, Window
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import task_pb2
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import OPTIONS
from fedel.wire.codec import profile_to_pb, report_to_pb
from fedel.wire.payload import Payload, pack
from fedel.wire.protocol import PROTOCOL
from fedel.wire.retry import retrying
from fedel.wire.streams import fetch_model, push_update

MAX_DIALLING = 50
"""Clients of one process that open their session at the same time."""


@dataclass(frozen=True)
class Fleet:
    """What one process of light clients does."""

    address: str
    """Of the coordinator."""
    first: int
    num_clients: int
    num_tensors: int = 20
    model_bytes: int = 20_000
    downloads: bool = False
    """Each client fetches the whole model before it sends its update."""
    uploads: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class LightClients:
    """All clients of this process; they share one update."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.spec = made_up_spec(fleet.num_tensors, fleet.model_bytes)
        self.profile = profile_to_pb(made_up_profile(self.spec))
        model = made_up_model(self.spec, seed=1) if fleet.uploads else {}
        self.payload: Payload = pack({name: Patch(values) for name, values in model.items()})
        self.selected = tuple(tensor.name for tensor in self.spec.weights)
        self.counts: Counter[str] = Counter()
        self.dialling = asyncio.Semaphore(MAX_DIALLING)

    async def run(self) -> None:
        numbers = range(self.fleet.first, self.fleet.first + self.fleet.num_clients)
        await asyncio.gather(*(LightClient(self, number).run() for number in numbers))

    def tell(self, **what: Any) -> None:
        print(json.dumps(what), flush=True)


class LightClient:
    def __init__(self, clients: LightClients, number: int) -> None:
        self._clients, self._name = clients, f"light-{number:05}"
        self._is_first = number == clients.fleet.first
        # Each device has a connection of its own; without this, all of a process would share one.
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channel = aio.insecure_channel(clients.fleet.address, options=options)
        self._bulk: aio.Channel | None = None
        self._options = options
        self._call: Any = None
        self._writing = asyncio.Lock()
        self._work: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the run ends, or the coordinator does."""
        clients = self._clients
        async with clients.dialling:
            self._call = CoordinatorServiceStub(self._channel).Session()
            hello = pb.Hello(client=self._name, protocol=PROTOCOL, device=pb.DeviceFacts(device_type="light"))
            await self._call.write(pb.SessionRequest(hello=hello))
            welcome = (await self._call.read()).welcome
        clients.counts["sessions"] += 1
        if clients.counts["sessions"] == clients.fleet.num_clients:
            clients.tell(sessions=clients.fleet.num_clients)
        beating = asyncio.create_task(self._beat(welcome.heartbeat_seconds))
        try:
            while (message := await self._call.read()) is not aio.EOF:
                if not await self._take(message):
                    return
        finally:
            beating.cancel()
            self._call.cancel()

    async def _beat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._send(pb.SessionRequest(heartbeat=pb.Heartbeat()))

    async def _take(self, message: pb.SessionResponse) -> bool:
        """Whether the run goes on."""
        clients, kind = self._clients, message.WhichOneof("kind")
        if kind == "run":
            await self._join(message.run)
        elif kind == "task":
            task = asyncio.create_task(self._carry_out(message.task))
            self._work.add(task)
            task.add_done_callback(self._settled)
        elif kind == "closed":
            clients.counts["counted" if message.closed.counted else "lost"] += 1
            if self._is_first:
                clients.tell(closed=message.closed.round_num)
        elif kind == "refused":
            clients.tell(error=message.refused.reason)
        return kind != "ended"

    async def _join(self, offer: pb.RunOffer) -> None:
        clients = self._clients
        self._bulk = aio.insecure_channel(offer.shards[0].address, options=self._options)
        join = pb.Join(
            run=offer.run, model_digest=clients.spec.digest, num_samples=100, profile=clients.profile
        )
        await self._send(pb.SessionRequest(join=join))

    async def _carry_out(self, task: task_pb2.Task) -> None:
        """As an agent does: accept, say what it is at, send the update, report."""
        clients, run, number = self._clients, task.run, task.round_num
        assert self._bulk is not None
        stub = AggregatorServiceStub(self._bulk)
        report = Report(
            client=self._name,
            round_num=task.round_num,
            num_samples=100,
            num_steps=task.work.num_steps,
            effective_steps=1.0,
            loss=1.0,
            train_seconds=0.01,
            step_seconds=0.001,
            window=Window(1, clients.spec.num_blocks),
            selected=clients.selected,
        )
        await self._send(pb.SessionRequest(answer=pb.TaskAnswer(run=run, round_num=number, accepted=True)))
        await self._at(task, "download")
        received = 0
        if clients.fleet.downloads:
            fetched = await retrying(lambda: fetch_model(stub, task.run, task.model_version))
            received = fetched.num_bytes
        await self._at(task, "train")
        await self._at(task, "upload")
        sent = await retrying(lambda: push_update(stub, task.run, report, clients.payload))
        done = pb.TaskDone(
            run=task.run,
            report=report_to_pb(report),
            phases=pb.PhaseSeconds(download=0.001, train=0.01, upload=0.001),
            bytes_up=sent.num_bytes,
            bytes_down=received,
        )
        await self._send(pb.SessionRequest(done=done))

    async def _at(self, task: task_pb2.Task, phase: str) -> None:
        progress = pb.TaskProgress(run=task.run, round_num=task.round_num, phase=phase)
        await self._send(pb.SessionRequest(progress=progress))

    async def _send(self, request: pb.SessionRequest) -> None:
        async with self._writing:  # gRPC takes one message of a stream at a time
            await self._call.write(request)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._clients.counts["errors"] += 1
            self._clients.tell(error=f"{self._name}: {type(error).__name__}: {error}")


async def main() -> None:
    clients = LightClients(Fleet(**json.loads(sys.argv[1])))
    try:
        await clients.run()
    except aio.AioRpcError as error:
        clients.tell(error=f"{error.code()}: {error.details()}")
    clients.tell(counts=clients.counts)


if __name__ == "__main__":
    asyncio.run(main())
