"""Real servers to fuzz, in plain text and with certificates, and honest clients that must still get through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedel import testing
from fedel.roles.aggregator import RoundFold
from fedel.security.folder import load
from fedel.security.identity import RULES, Identity
from fedel.security.tls import Tls
from fedel.strategies import build
from fedel.v1 import aggregator_pb2 as agg
from fedel.v1 import coordinator_pb2 as coord
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.enrol import enrol, fetch_authority
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model, model_header, push_model, push_update
from tests.fuzz import samples
from tests.security.support import Pki, servers
from tests.services.coordinator.support import Federation, ScriptedAgent, run_config, trainers

HONEST = "honest"
"""The run of the honest clients; no case names it."""
ROLES = ("agent", "operator", "service")
HOSTILE = "mallory"
KEEPER = "client-1"
_STRATEGY = {"name": "fedavg", "weighting": "samples"}


@dataclass(frozen=True)
class World:
    """Servers that run, with channels to them as a hostile caller has them."""

    channels: Mapping[str, aio.Channel]
    """By service and role, ``AggregatorService/agent``; in plain text all roles are the same."""
    honest: Any
    """A coroutine function: honest clients do their work, and it comes out right."""
    goes_on: Any
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


@asynccontextmanager
async def plain(folder: Path) -> AsyncIterator[World]:
    """One aggregator and a coordinator; a round of the run that the cases name is open."""
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(Federation(folder))
        rounds = {"num_rounds": 50, "min_clients": 1, "evaluate_every": 0}
        await made.create(run_config(**rounds), samples.RUN)
        keeper = Keeper(made, KEEPER, trainers()[KEEPER])
        keeper.hold.clear()
        made.agents.append(keeper.start())
        await keeper.until("task")
        bulk = await stack.enter_async_context(connect(made.aggregators[0]))
        other = model_header("other", {"name": "fedel"}, samples.SPEC)
        await push_model(AggregatorServiceStub(bulk), other, testing.initial_model())
        channels = {f"AggregatorService/{role}": bulk for role in ROLES}
        channels |= {f"CoordinatorService/{role}": made.channel for role in ROLES}

        async def honest() -> None:
            await healthy(bulk)
            await healthy(made.channel)
            await upload_and_commit(bulk, bulk, bulk)
            await whole_run(made)

        async def goes_on() -> None:
            keeper.hold.set()
            running = coord.RUN_PHASE_RUNNING
            status = await made.status(lambda s: s.round_num > 0 or s.phase != running, samples.RUN)
            assert status.phase == running, f"the run stopped: {status.message}"

        yield World(channels, honest, goes_on)


@asynccontextmanager
async def secure(folder: Path) -> AsyncIterator[World]:
    """The same with certificates, and with enrolment; the hostile caller has one of each role."""
    pki = Pki(folder)
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(servers(folder, pki))

        async def channel(address: str, role: str, name: str = HOSTILE) -> aio.Channel:
            return await stack.enter_async_context(connect(address, pki.tls(role, name)))

        channels = {f"AggregatorService/{role}": await channel(made.aggregator_address, role) for role in ROLES}
        channels |= {
            f"CoordinatorService/{role}": await channel(made.coordinator_address, role) for role in ROLES
        }
        channels |= {f"EnrolmentService/{role}": channels[f"CoordinatorService/{role}"] for role in ROLES}
        ca = load(pki.tls("agent", "a").folder).ca
        strangers = aio.secure_channel(made.enrolment_address, grpc.ssl_channel_credentials(ca))
        channels["EnrolmentService/nobody"] = await stack.enter_async_context(strangers)
        honest_agent = await channel(made.aggregator_address, "agent", samples.CLIENTS[1])
        operator, service = (channels[f"AggregatorService/{role}"] for role in ("operator", "service"))
        await push_model(AggregatorServiceStub(operator), _header(samples.RUN), testing.initial_model())

        async def honest() -> None:
            await healthy(channels["CoordinatorService/agent"])
            await upload_and_commit(operator, honest_agent, service, samples.CLIENTS[1:2])
            token = pki.authority.promise(Identity("agent", "jetson"))
            authority = await asyncio.to_thread(fetch_authority, made.enrolment_address, token.fingerprint)
            await enrol(made.enrolment_address, token, folder / "jetson", authority)
            async with connect(made.coordinator_address, Tls(dir=str(folder / "jetson"))) as own:
                await healthy(own)

        async def goes_on() -> None:
            await healthy(channels["CoordinatorService/agent"])

        yield World(channels, honest, goes_on)


def _header(run: str) -> agg.ModelHeader:
    return model_header(run, _STRATEGY, samples.SPEC)


async def healthy(channel: aio.Channel) -> None:
    call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert health_pb2.HealthCheckResponse.SERVING == (await call).status


async def upload_and_commit(
    operator: aio.Channel, agent: aio.Channel, service: aio.Channel, clients: tuple[str, ...] = samples.CLIENTS
) -> None:
    """A round of honest uploads gives the bits that the fold gives."""
    model = testing.initial_model()
    await push_model(AggregatorServiceStub(operator), _header(HONEST), model)
    fold = RoundFold(build(_STRATEGY), samples.SPEC)
    for client in clients:
        update = samples.whole_update(client)
        fold.add(update)
        await push_update(AggregatorServiceStub(agent), HONEST, update.report, pack(update.patches))
    closing = AggregatorServiceStub(service)
    await closing.SealRound(agg.SealRoundRequest(run=HONEST, round_num=0))
    await closing.CommitRound(agg.CommitRoundRequest(run=HONEST, round_num=0, clients=clients))
    made = (await fetch_model(AggregatorServiceStub(agent), HONEST)).tensors
    expected = fold.finish(model, {}).model
    assert all(np.array_equal(expected[name], made[name]) for name in expected), "another model"


async def whole_run(made: Federation) -> None:
    """Three honest agents and a run of their own, from the first offer to the end."""
    run = f"{HONEST}-run"
    config = run_config(num_rounds=2)
    await made.create(config, run)
    agents = []
    for name in list(trainers())[3:6]:
        agent = Loyal(made, name, trainers()[name])
        agent.run = run
        made.agents.append(agent)
        agents.append(agent.start())
    records = await made.finished(run)
    assert [3, 3] == [record.num_updates for record in records], "honest updates are missing"
    for agent in agents:
        await agent.drop()
