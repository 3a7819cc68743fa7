"""Secure aggregation over gRPC: the bits of a plain run with the same updates, also if some are lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as serve_aggregator
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.server import serve as serve_coordinator
from fedel_edge import tasks
from fedel_edge.agent import Agent
from fedel_edge.exchange import Exchange

from fedel.job import Protection, RunConfig, Server
from fedel.v1 import coordinator_pb2 as pb
from tests.federation.processes import RUN
from tests.federation.support import (
    PATIENCE_SECONDS,
    agents,
    create_run,
    job_of,
    model_of,
    servers,
    simulated,
    watching,
)
from tests.simulation.history import History, Script
from tests.strategies.fakes import same_bits

NUM_CLIENTS = 4
ASKED = {"after_keys": pb.SecureRoster, "after_shares": pb.SecureGroup, "before_unmasking": pb.SecureUnmask}
COUNTS = ("after_upload", "before_unmasking")
"""Lost so late that its update counts."""


def job(name: str = "fedavg", secure: bool = True, **rounds: object) -> RunConfig:
    plain = job_of({"name": name}, NUM_CLIENTS, **rounds)
    return replace(plain, protection=Protection(secure=secure))


@dataclass
class Leaving:
    """Stops an agent at a moment of one round."""

    client: str
    round_num: int
    moment: str
    agents: list[Agent] = field(default_factory=list)
    times: int = 0

    def stop(self) -> None:
        self.times += 1
        self.agents[int(self.client.rpartition("-")[2])].stop()

    def is_at(self, client: str, round_num: int) -> bool:
        return (client, round_num) == (self.client, self.round_num)

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hear, upload = Exchange.hear, tasks.upload

        def hear_or_leave(exchange, message):
            if self.is_at(exchange._client, message.round_num) and isinstance(message, ASKED[self.moment]):
                return self.stop()
            return hear(exchange, message)

        async def upload_and_leave(run, dialer, update):
            sent = await upload(run, dialer, update)
            if self.is_at(update.header.report.client, update.header.report.round_num):
                self.stop()
                await asyncio.Event().wait()
            return sent

        if self.moment in ASKED:
            monkeypatch.setattr(Exchange, "hear", hear_or_leave)
        else:
            monkeypatch.setattr(tasks, "upload", upload_and_leave)


async def run(
    job: RunConfig, folder: Path, leaving: Leaving | None = None, num_aggregators: int = 1
) -> tuple[list[list[str]], dict[str, object], list[dict[str, int]]]:
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(servers(folder, num_aggregators))
        await create_run(made.address, RUN, job)
        watch = await stack.enter_async_context(watching(made.address, RUN))
        clients = range(NUM_CLIENTS)
        started = await stack.enter_async_context(agents(folder, made.address, clients, NUM_CLIENTS))
        if leaving:
            leaving.agents = started
        await watch.finished()
        tensors = [record.tensor_clients for record in watch.records]
        return watch.counted, await model_of(made.address, RUN, folder), tensors


def counted(history: History) -> list[list[str]]:
    return [sorted(updates) for updates in history.counted]


@pytest.mark.parametrize("num_aggregators", [1, 2])
def test_nobody_lost(tmp_path: Path, num_aggregators: int) -> None:
    expected = simulated(job(secure=False), NUM_CLIENTS)
    clients, model, _ = asyncio.run(run(job(), tmp_path, num_aggregators=num_aggregators))
    assert counted(expected) == clients
    assert same_bits(expected.model, model)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_tensors_of_few_clients_stay(tmp_path: Path, damping: float) -> None:
    plain = job("fedel")
    asked = replace(plain, strategy={**plain.strategy, "damping": damping}, server=Server(average=damping))
    expected = simulated(asked, NUM_CLIENTS)
    clients, model, tensors = asyncio.run(run(asked, tmp_path))
    assert counted(expected) == clients
    assert [record.tensor_clients for record in expected.records] == tensors
    assert any(0 in each.values() for each in tensors)
    assert same_bits(expected.published, model)


@pytest.mark.parametrize("moment", ["after_keys", "after_shares", "after_upload", "before_unmasking"])
def test_one_lost(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leaving = Leaving("client-1", 1, moment)
    leaving.plant(monkeypatch)
    away = Script(away={round_num: {"client-1"} for round_num in range(2 if moment in COUNTS else 1, 3)})
    expected = simulated(job(secure=False), NUM_CLIENTS, away)
    clients, model, _ = asyncio.run(run(job(), tmp_path, leaving))
    assert 1 == leaving.times
    assert counted(expected) == clients
    assert same_bits(expected.model, model)


async def run_with_restart(
    job: RunConfig, folder: Path, moment: asyncio.Event
) -> tuple[list[list[str]], object]:
    """The coordinator is stopped at the moment, and started again at its address."""
    aggregator = AggregatorConfig(listen="127.0.0.1:0", data_dir=folder / "aggregator")
    async with AsyncExitStack() as stack:
        held, _ = await stack.enter_async_context(serve_aggregator(aggregator))
        config = CoordinatorConfig(
            listen="127.0.0.1:0", aggregators=(held,), database_url=f"sqlite:///{folder / 'coordinator.db'}"
        )
        async with serve_coordinator(config) as (address, _):
            await create_run(address, RUN, job)
            await stack.enter_async_context(agents(folder, address, range(NUM_CLIENTS), NUM_CLIENTS))
            await asyncio.wait_for(moment.wait(), PATIENCE_SECONDS)
        await stack.enter_async_context(serve_coordinator(replace(config, listen=address)))
        watch = await stack.enter_async_context(watching(address, RUN))
        await watch.finished()
        return watch.counted, await model_of(address, RUN, folder)


@pytest.mark.parametrize("asked", [pb.SecureRoster, pb.SecureGroup, pb.SecureUnmask])
def test_coordinator_restarted(tmp_path: Path, asked: type, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, hear = simulated(job(secure=False), NUM_CLIENTS), Exchange.hear
    moment: list[asyncio.Event] = []

    def hear_until(exchange, message):
        if isinstance(message, asked) and message.round_num == 1 and not moment[0].is_set():
            moment[0].set()
            return None
        return hear(exchange, message)

    async def scenario():
        moment.append(asyncio.Event())
        return await run_with_restart(job(), tmp_path, moment[0])

    monkeypatch.setattr(Exchange, "hear", hear_until)
    clients, model = asyncio.run(scenario())
    assert counted(expected)[-1:] == clients[-1:]
    assert same_bits(expected.model, model)
