"""Events that meet at a bad moment: each test holds one of them until the other has arrived."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
from fedel_coordinator.run import CoordinatorRun
from fedel_coordinator.servicer import CoordinatorServicer
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import RunRow

from fedel.v1 import coordinator_pb2 as pb
from tests.services.coordinator.support import (
    RUN,
    STEP_SECONDS,
    Federation,
    ScriptedAgent,
    asynchronous,
    run_config,
    trainers,
)


class HeldStore:
    """A store whose first call of one method waits until ``go_on`` is set."""

    def __init__(self, inner: SqlStore, method: str) -> None:
        self.inner, self.method = inner, method
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.together = nullcontext  # in one transaction with others, the call would hold all other runs too

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)
        if name != self.method or self.reached.is_set():
            return call

        def held(*arguments: Any) -> Any:
            self.reached.set()
            assert self.go_on.wait(2 * STEP_SECONDS)
            return call(*arguments)

        return held

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, STEP_SECONDS)


async def hold_store(federation: Federation, method: str) -> HeldStore:
    """Restart the coordinator with a store that holds its first call of a method."""
    await federation.stop_coordinator()
    store = HeldStore(SqlStore(federation.settings["database_url"]), method)
    await federation.start_coordinator(store=store)
    return store


def leaving_signal(run: CoordinatorRun) -> asyncio.Event:
    """Set when the run starts to deal with a client's goodbye."""
    signal, left = asyncio.Event(), run.left

    async def left_with_signal(client: str) -> None:
        signal.set()
        await left(client)

    run.left = left_with_signal  # type: ignore[method-assign]
    return signal


async def until_joined(agent: ScriptedAgent) -> None:
    """Wait until the coordinator has dealt with the agent's joins: it answers a session's messages in order."""
    await agent.until("run")
    await agent.send(join=pb.Join(run="nothing"))
    await agent.until("refused", run="nothing")


@asynchronous
async def test_leave_while_plan_is_written(tmp_path: Path) -> None:
    async with Federation(tmp_path, heartbeat_seconds=100.0) as federation:
        store = await hold_store(federation, "put_round")
        await federation.create(run_config(num_rounds=1, evaluate_every=0))
        leaving = leaving_signal(federation.coordinator.runs[RUN])
        federation.start_agents(2)
        leaver = federation.agent("client-2", script={0: "silent"})
        await store.until_reached()
        goodbye = asyncio.create_task(leaver.leave())
        await asyncio.wait_for(leaving.wait(), STEP_SECONDS)
        store.go_on.set()
        await goodbye
        # Its deadline is 60 s away: more than ``finished`` waits.
        (record,) = await federation.finished()
        assert (3, 2) == (record.num_tasks, record.num_updates)
        assert record.latency_seconds < STEP_SECONDS


class HeldGoodbye:
    """Holds the first session that its agent closed, between its last message and what follows from its end."""

    def __init__(self) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()


class HeldContext:
    """A call's context that does the holding."""

    def __init__(self, hold: HeldGoodbye, inner: Any) -> None:
        self._hold, self._inner = hold, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def write(self, message: pb.SessionResponse) -> None:
        await self._inner.write(message)
        if message.WhichOneof("kind") is None and not self._hold.reached.is_set():
            self._hold.reached.set()
            await self._hold.go_on.wait()


@pytest.fixture
def held_goodbye(monkeypatch: pytest.MonkeyPatch) -> HeldGoodbye:
    hold, inner = HeldGoodbye(), CoordinatorServicer.Session

    async def session(servicer: CoordinatorServicer, requests: Any, context: Any) -> None:
        await inner(servicer, requests, HeldContext(hold, context))

    monkeypatch.setattr(CoordinatorServicer, "Session", session)
    return hold


async def rejoin_during_goodbye(federation: Federation, hold: HeldGoodbye, **script: Any) -> ScriptedAgent:
    """The newer of two sessions of client-0, which joined before the older one had ended."""
    older = federation.agent("client-0", **script)
    await until_joined(older)
    goodbye = asyncio.create_task(older.leave())
    await asyncio.wait_for(hold.reached.wait(), STEP_SECONDS)
    newer = federation.agent("client-0", **script)
    await until_joined(newer)
    hold.go_on.set()
    await goodbye
    return newer


@asynchronous
async def test_rejoin_during_goodbye_is_not_undone(tmp_path: Path, held_goodbye: HeldGoodbye) -> None:
    async with Federation(tmp_path, heartbeat_seconds=100.0) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=2, evaluate_every=0))
        await rejoin_during_goodbye(federation, held_goodbye)
        assert [False] == [row.has_left for row in federation.coordinator.store.clients(RUN)]
        federation.agent("client-1")
        (record,) = await federation.finished()
        assert 2 == record.num_updates


@asynchronous
async def test_rejoined_client_stays_connected(tmp_path: Path, held_goodbye: HeldGoodbye) -> None:
    async with Federation(tmp_path, heartbeat_seconds=100.0) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=2))
        newer = await rejoin_during_goodbye(federation, held_goodbye, accuracies={1: 0.5})
        # Events are applied in order: after this one, those of the older session's end have been.
        await federation.control(pb.RUN_ACTION_RESUME)
        assert federation.coordinator.runs[RUN].state.members["client-0"].connected
        federation.agent("client-1")
        (record,) = await federation.finished()
        assert 0.5 == record.accuracy
        assert 1 == len(newer.kinds("evaluate"))


class JoinsOne(ScriptedAgent):
    """Joins one run of those it is offered."""

    only = ""

    async def _join(self, offer: pb.RunOffer) -> None:
        if offer.run == self.only:
            await super()._join(offer)


@asynchronous
async def test_rejoin_between_leaving_two_runs(tmp_path: Path) -> None:
    async with Federation(tmp_path, heartbeat_seconds=100.0) as federation:
        store = await hold_store(federation, "set_left")
        runs = federation.coordinator.runs
        for name in ("one", "two"):
            await federation.create(run_config(min_clients=2), name)
        signals = {name: leaving_signal(runs[name]) for name in ("one", "two")}
        older = federation.agent("client-0")
        await older.until("run", 2)
        await until_joined(older)
        goodbye = asyncio.create_task(older.leave())
        await store.until_reached()
        (first,) = [name for name, signal in signals.items() if signal.is_set()]
        second = "two" if first == "one" else "one"
        newer = JoinsOne(federation, "client-0", trainers()["client-0"])
        newer.only = second
        federation.agents.append(newer)
        newer.start()
        await newer.until("run", 2)
        await until_joined(newer)
        store.go_on.set()
        await goodbye
        assert [True] == [row.has_left for row in store.clients(first)]
        assert [False] == [row.has_left for row in store.clients(second)]


@asynchronous
async def test_rejoined_evaluator_gets_test_again(tmp_path: Path) -> None:
    async with Federation(tmp_path, heartbeat_seconds=100.0) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=1))
        older = federation.agent("client-0", accuracies={1: 0.5})
        older.mute_evaluations = True
        await older.until("evaluate")
        newer = federation.agent("client-0", accuracies={1: 0.5})
        (record,) = await federation.finished()
        assert 0.5 == record.accuracy
        assert grpc.StatusCode.ALREADY_EXISTS == older.error
        assert 1 == len(newer.kinds("evaluate"))


class HeldStatement:
    """An SQL statement that waits until ``go_on`` is set, with its transaction open."""

    def __init__(self, start: str) -> None:
        self.start = start
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(self.start):
            self.reached.set()
            assert self.go_on.wait(2 * STEP_SECONDS)


@pytest.fixture
def held_update() -> Iterator[HeldStatement]:
    held = HeldStatement("UPDATE runs")
    sa.event.listen(sa.Engine, "before_cursor_execute", held)
    yield held
    sa.event.remove(sa.Engine, "before_cursor_execute", held)


def test_reads_do_not_wait_for_a_write(tmp_path: Path, held_update: HeldStatement) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/store.db")
    store.create_run(RunRow("a", "{}", "{}", 1, "waiting", 10.5))
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(store.set_phase, "a", "running")
        try:
            assert held_update.reached.wait(STEP_SECONDS)
            row = threads.submit(store.run, "a").result(timeout=1)
            assert row is not None
            assert "waiting" == row.phase
            assert [] == threads.submit(store.records, "a").result(timeout=1)
        finally:
            held_update.go_on.set()
        writing.result(STEP_SECONDS)
    assert ["running"] == [row.phase for row in store.runs()]
    store.close()
