"""The coordinator dies at every point of a round; a new one on the same database goes on to the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fedel_coordinator.shards import Shards
from fedel_coordinator.sql import SqlStore

from fedel.chaos.postgres import fresh_database
from fedel.records import RoundRecord
from fedel.v1 import coordinator_pb2 as pb
from tests.services.coordinator.support import RUN, STEP_SECONDS, Federation, asynchronous, run_config
from tests.services.coordinator.test_rounds import expected_model
from tests.strategies.fakes import same_bits

ACCURACIES = {1: 0.3, 2: 0.5, 3: 0.4}


class Killed(BaseException):
    """An error that no code handles: nothing happens after it."""


class FailAt:
    """Wraps a store or the shards, and kills the n-th caller of the chosen method."""

    def __init__(self, inner: Any, method: str, when: str, count: int = 2) -> None:
        self.inner, self.method, self.when, self.left = inner, method, when, count
        self.killed, self._loop = asyncio.Event(), asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        return self._doomed(attribute) if name == self.method else attribute

    def _doomed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0 and self.when == "before":
                self._kill()
            result = call(*arguments)
            if self.left == 0:
                if asyncio.iscoroutine(result):
                    return self._kill_after(result)
                self._kill()
            return result

        return maybe

    async def _kill_after(self, result: Any) -> None:
        await result
        self._kill()

    def _kill(self) -> None:
        self._loop.call_soon_threadsafe(self.killed.set)
        raise Killed(self.method)


async def run_with_a_death(federation: Federation, part: str, method: str, when: str) -> list[RoundRecord]:
    """Records of a run whose coordinator dies in its second round."""
    await federation.stop_coordinator()
    parts = {"store": SqlStore(federation.settings["database_url"]), "shards": Shards(federation.aggregators)}
    parts[part] = doomed = FailAt(parts[part], method, when)
    await federation.start_coordinator(**parts)
    await federation.create(run_config())
    federation.start_agents(3, accuracies=ACCURACIES)
    await asyncio.wait_for(doomed.killed.wait(), STEP_SECONDS)
    await federation.restart_coordinator()
    return await federation.finished()


def untrained(records: list[RoundRecord]) -> dict[str, int]:
    """Rounds since each tensor was last trained, counted from the records."""
    counts = dict.fromkeys(records[0].tensor_clients, 0)
    for record in records:
        counts = {name: 0 if record.tensor_clients[name] else count + 1 for name, count in counts.items()}
    return counts


POINTS = [
    ("store", "put_round"),
    ("store", "seal_round"),
    ("shards", "seal"),
    ("shards", "commit"),
    ("store", "commit_round"),
    ("shards", "keep"),
    ("store", "close_round"),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("part", "method"), POINTS)
@asynchronous
async def test_a_run_goes_on_to_the_same_model(tmp_path: Path, part: str, method: str, when: str) -> None:
    async with Federation(tmp_path) as federation:
        records = await run_with_a_death(federation, part, method, when)
        assert [0, 1, 2] == [record.round for record in records]
        assert [3, 3, 3] == [record.num_updates for record in records]
        assert [0.3, 0.5, 0.4] == [record.accuracy for record in records]
        assert same_bits(expected_model(), await federation.model())
        assert [untrained(records[:n]) for n in (1, 2, 3)] == [r.tensor_untrained_rounds for r in records]
        row = federation.coordinator.store.run(RUN)
        assert (3, 2, 0.5) == (row.model_version, row.best_version, row.best_accuracy)


@asynchronous
async def test_a_run_on_postgresql_goes_on_to_the_same_model(tmp_path: Path, postgres_server: str) -> None:
    async with Federation(tmp_path, database_url=fresh_database(postgres_server)) as federation:
        records = await run_with_a_death(federation, "store", "commit_round", "before")
        assert [0.3, 0.5, 0.4] == [record.accuracy for record in records]
        assert same_bits(expected_model(), await federation.model())


@pytest.mark.parametrize("when", ["before", "after"])
@asynchronous
async def test_a_report_that_was_being_kept_is_sent_again(tmp_path: Path, when: str) -> None:
    async with Federation(tmp_path) as federation:
        await federation.stop_coordinator()
        store = FailAt(SqlStore(federation.settings["database_url"]), "put_report", when, count=4)
        await federation.start_coordinator(store=store)
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(3)
        broken = [asyncio.create_task(agent.until("task", round_num=1)) for agent in agents]
        await asyncio.gather(*broken)
        await federation.restart_coordinator()
        await federation.finished()
        assert same_bits(expected_model(), await federation.model())


@asynchronous
async def test_a_waiting_run_keeps_its_clients(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(evaluate_every=0))
        federation.start_agents(2)
        await federation.status(lambda s: len(s.clients) == 2)
        await federation.restart_coordinator()
        status = await federation.status(lambda s: bool(s.message))
        assert ("waits for 1 more client", 2) == (status.message.partition(";")[0], len(status.clients))
        federation.agent("client-2")
        await federation.finished()
        assert same_bits(expected_model(), await federation.model())


@asynchronous
async def test_clients_not_yet_back_are_part_of_the_next_plan(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(3)
        await agents[0].until("closed", round_num=0)
        for agent in agents:
            await agent.drop()
        await federation.stop_coordinator()
        await federation.start_coordinator()
        agents[0].start()
        await agents[0].until("task", round_num=1)
        for agent in agents[1:]:
            agent.start()
        records = await federation.finished()
        assert [3, 3, 3] == [record.num_updates for record in records]
        assert same_bits(expected_model(), await federation.model())


@pytest.mark.parametrize("action", [pb.RUN_ACTION_PAUSE, pb.RUN_ACTION_STOP], ids=["paused", "stopping"])
@asynchronous
async def test_a_pause_or_stop_is_kept(tmp_path: Path, action: Any) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(3)
        agents[0].hold.clear()
        await agents[0].until("task", round_num=0)
        await federation.control(action)
        await federation.restart_coordinator()
        agents[0].hold.set()
        status = await federation.status(lambda s: s.round_phase == "waiting")
        assert 1 == status.round_num
        if action == pb.RUN_ACTION_PAUSE:
            await federation.control(pb.RUN_ACTION_RESUME)
        assert (3 if action == pb.RUN_ACTION_PAUSE else 1) == len(await federation.finished())


@asynchronous
async def test_a_run_that_cannot_go_on_does_not_block_the_others(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        for name in ("one", "two"):
            await federation.create(run_config(num_rounds=1, evaluate_every=0), name)
        await federation.stop_coordinator()
        url = federation.settings["database_url"]
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            strange = "UPDATE runs SET config_json = replace(config_json, 'fedel', 'fedzz') WHERE name = 'one'"
            connection.execute(sa.text(strange))
        engine.dispose()
        await federation.start_coordinator()
        federation.start_agents(3)
        assert 1 == len(await federation.finished("two"))
        runs = (await federation.stub.ListRuns(pb.ListRunsRequest())).runs
        broken = next(status for status in runs if status.run == "one")
        assert pb.RUN_PHASE_PAUSED == broken.phase
        assert "strategy 'fedzz' is unknown" in broken.message
