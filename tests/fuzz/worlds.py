"""Servers to fuzz, in plain text and with certificates, and honest clients that must still get through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedel import testing
from fedel.job import RunConfig
from fedel.roles.aggregator import RoundFold
from fedel.security.authority import Authority
from fedel.security.folder import load
from fedel.security.identity import RULES, Identity
from fedel.security.tls import Tls
from fedel.strategies import build
from fedel.types import Tensors
from fedel.v1 import aggregator_pb2 as agg
from fedel.v1 import coordinator_pb2 as coord
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.enrol import enrol, fetch_authority
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model, model_header, push_model, push_update
from tests.fuzz import samples
from tests.fuzz.servers import SECURE, ServerProcess, started
from tests.security.support import Pki
from tests.services.coordinator.support import Federation, ScriptedAgent, trainers
from tests.simulation.history import Script, play_run
from tests.strategies.fakes import WORK, same_bits

HONEST = "honest"
"""The run of the honest clients; no case names it."""
MEMBERS = tuple(trainers())[3:6]
"""The honest clients. No case speaks as one of these: without certificates, that would take its place."""
ROLES = ("agent", "operator", "service")
HOSTILE = "mallory"
KEEPER = "client-1"
_STRATEGY = {"name": "fedavg", "weighting": "samples"}
_WAITS = 3e3
"""Seconds that a round waits for its clients: no round of a fuzzed run may be over only because time passed."""


@dataclass(frozen=True)
class World:
    """Servers that run, with channels to them as a hostile caller has them."""

    channels: Mapping[str, aio.Channel]
    """By service and role, ``AggregatorService/agent``; in plain text all roles are the same."""
    server: Any = None
    honest: Any = None
    """A coroutine function: honest clients do their work, and it comes out right."""
    goes_on: Any = None
    """A coroutine function: the run that the cases name goes on to its next round."""
    held: list[Any] = field(default_factory=list)
    """Sessions of hostile agents that are still open."""

    def channel(self, service: str, method: str) -> aio.Channel:
        roles = RULES.get(f"/fedel.v1.{service}/{method}", frozenset())
        role = next((role for role in ROLES if role in roles), "nobody")
        return self.channels[f"{service}/{role}"]


class Loyal(ScriptedAgent):
    """Takes part in one run only."""

    run = HONEST

    async def _join(self, offer: Any) -> None:
        if offer.run == self.run:
            await super()._join(offer)


class Keeper(Loyal):
    """An honest member of the run that the cases name; keeps its round open until ``hold`` is set."""

    run = samples.RUN


class Clients(Federation):
    """The people and agents of a federation whose servers run in a process of their own."""

    def __init__(self, folder: Path, server: ServerProcess, authority: Authority | None) -> None:
        super().__init__(folder)
        self.address, self.aggregators = server.coordinator, [server.aggregator]
        self._certificates = _Certificates(folder, authority) if authority else None

    async def __aenter__(self) -> Clients:
        self.channel = self.connect(self.address)
        self.stub = CoordinatorServiceStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        for agent in self.agents:
            await agent.drop()
        await self.channel.close()

    def connect(self, address: str, role: str = "operator", name: str = "op") -> aio.Channel:
        return connect(address, self._certificates.of(role, name) if self._certificates else None)


class _Certificates(Pki):
    def __init__(self, folder: Path, authority: Authority) -> None:
        self.folder, self.authority = folder, authority
        self._made: dict[tuple[str, str], Tls] = {}

    def of(self, role: str, name: str) -> Tls:
        if (role, name) not in self._made:
            self._made[role, name] = self.tls(role, name)
        return self._made[role, name]


@asynccontextmanager
async def plain(folder: Path, clients: Collection[str]) -> AsyncIterator[World]:
    """A coordinator and an aggregator. ``clients`` are planned in a round of the run ``samples.PLANNED``."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(started("plain", folder))
        made = await stack.enter_async_context(Clients(folder, server, None))
        bulk = await stack.enter_async_context(made.connect(server.aggregator))
        channels = {f"AggregatorService/{role}": bulk for role in ROLES}
        channels |= {
            f"{service}Service/{role}": made.channel for role in ROLES for service in ("Coordinator", "Code")
        }
        keeper = await _runs(made, bulk, bulk, clients)

        async def honest() -> None:
            await upload_and_commit(bulk, bulk, bulk)
            await whole_run(made)

        yield World(channels, server, honest, _next_round(made, keeper))


@asynccontextmanager
async def secure(folder: Path, clients: Collection[str]) -> AsyncIterator[World]:
    """The same with certificates, and with enrolment; the hostile caller has one of each role."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(started(SECURE, folder))
        authority = Authority(folder / "ca")
        made = await stack.enter_async_context(Clients(folder, server, authority))
        channels = {}
        for role in ROLES:
            for service, address in (("Aggregator", server.aggregator), ("Coordinator", server.coordinator)):
                channel = await stack.enter_async_context(made.connect(address, role, HOSTILE))
                channels[f"{service}Service/{role}"] = channel
        for role in ROLES:
            for service in ("Enrolment", "Code"):  # the coordinator serves them too
                channels[f"{service}Service/{role}"] = channels[f"CoordinatorService/{role}"]
        ca = load(folder / f"agent-{HOSTILE}").ca
        strangers = aio.secure_channel(server.enrolment, grpc.ssl_channel_credentials(ca))
        channels["EnrolmentService/nobody"] = await stack.enter_async_context(strangers)
        operator, service = (channels[f"AggregatorService/{role}"] for role in ("operator", "service"))
        keeper = await _runs(made, operator, service, clients)

        async def honest() -> None:
            agent = await stack.enter_async_context(made.connect(server.aggregator, "agent", KEEPER))
            await upload_and_commit(operator, agent, service, (KEEPER,))
            await whole_run(made)
            token = authority.promise(Identity("agent", "jetson"))
            trusted = await asyncio.to_thread(fetch_authority, server.enrolment, token.fingerprint)
            await enrol(server.enrolment, token, folder / "jetson", trusted)
            async with connect(server.coordinator, Tls(dir=str(folder / "jetson"))) as own:
                await healthy(own)

        yield World(channels, server, honest, _next_round(made, keeper))


async def _runs(
    made: Clients, operator: aio.Channel, service: aio.Channel, clients: Collection[str]
) -> ScriptedAgent:
    """What the cases name: a run whose first round is open, and two that only the aggregator knows."""
    await made.create(job(num_rounds=50, min_clients=1), samples.RUN)
    keeper = Keeper(made, KEEPER, trainers()[KEEPER], accuracies=dict.fromkeys(range(60), 0.5))
    keeper.hold.clear()
    made.agents.append(keeper.start())
    await keeper.until("task")
    other = model_header("other", {"name": "fedel"}, samples.SPEC)
    await push_model(AggregatorServiceStub(operator), other, testing.initial_model())
    await push_model(AggregatorServiceStub(operator), _header(samples.PLANNED), testing.initial_model())
    await open_round(service, samples.PLANNED, clients)
    return keeper


def _next_round(made: Clients, keeper: ScriptedAgent) -> Any:
    async def goes_on() -> None:
        keeper.hold.set()
        running = coord.RUN_PHASE_RUNNING
        status = await made.status(lambda s: s.round_num > 0 or s.phase != running, samples.RUN)
        assert status.phase == running, f"the run stopped: {status.message}"

    return goes_on


def _header(run: str) -> agg.ModelHeader:
    return model_header(run, _STRATEGY, samples.SPEC)


async def healthy(channel: aio.Channel) -> None:
    call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert health_pb2.HealthCheckResponse.SERVING == (await call).status


async def open_round(service: aio.Channel, run: str, clients: Collection[str]) -> None:
    request = samples.open_round(run, clients)
    await AggregatorServiceStub(service).OpenRound(request)


async def upload_and_commit(
    operator: aio.Channel, agent: aio.Channel, service: aio.Channel, clients: Sequence[str] = samples.CLIENTS
) -> None:
    """A round of honest uploads gives the bits that the fold gives."""
    model = testing.initial_model()
    await push_model(AggregatorServiceStub(operator), _header(HONEST), model)
    await open_round(service, HONEST, clients)
    fold = RoundFold(build(_STRATEGY), samples.SPEC)
    for client in clients:
        update = samples.whole_update(client)
        fold.add(update)
        await push_update(AggregatorServiceStub(agent), HONEST, update.report, pack(update.patches))
    closing = AggregatorServiceStub(service)
    await closing.SealRound(agg.SealRoundRequest(run=HONEST, round_num=0)).read()
    await closing.CommitRound(agg.CommitRoundRequest(run=HONEST, round_num=0, clients=clients))
    made = (await fetch_model(AggregatorServiceStub(agent), HONEST)).tensors
    expected = fold.finish(model, {}).model
    assert all(np.array_equal(expected[name], made[name]) for name in expected), "another model"


def job(**rounds: Any) -> RunConfig:
    """A fixed T_th: what a hostile client says about its speed changes nothing for the others."""
    return RunConfig.parse(
        {
            "seed": 3,
            "strategy": {"name": "fedel"},
            "rounds": {"num_rounds": 3, "min_clients": 3, "deadline_floor_seconds": _WAITS} | rounds,
            "budget": {"policy": "fixed", "value": 0.4, "pace": "plan"},
            "work": vars(WORK),
        }
    )


def simulated(config: RunConfig, counted: Sequence[Collection[str]]) -> Tensors:
    """The model of a run in which these clients count in each round."""
    away = {number: set(MEMBERS) - set(clients) for number, clients in enumerate(counted)}
    return play_run(config, {name: trainers()[name] for name in MEMBERS}, faults=Script(away=away)).model


async def whole_run(made: Federation) -> None:
    """Three honest agents and a run of their own, from the first offer to the end: the bits of a simulation."""
    run, config = f"{HONEST}-run", job(num_rounds=2)
    await made.create(config, run)
    agents = []
    for name in MEMBERS:
        agent = Loyal(made, name, trainers()[name], accuracies={1: 0.5, 2: 0.6})
        agent.run = run
        made.agents.append(agent)
        agents.append(agent.start())
    records = await made.finished(run)
    assert [(3, 0.5), (3, 0.6)] == [(r.num_updates, r.accuracy) for r in records], "something is missing"
    expected = await asyncio.to_thread(simulated, config, [MEMBERS, MEMBERS])
    assert same_bits(expected, await made.model(run)), "the honest run has other bits"
    for agent in agents:
        await agent.drop()
