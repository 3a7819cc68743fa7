"""Aggregators that are away or lost, and a database that does not answer for a while."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fedel_coordinator.shards import Shards, StoppedWaiting
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import StoreUnavailable

from fedel.v1 import coordinator_pb2 as pb
from tests.services.coordinator.support import RUN, STEP_SECONDS, Federation, asynchronous, run_config
from tests.services.coordinator.test_rounds import expected_model
from tests.strategies.fakes import same_bits


async def lose_an_aggregator_before_the_fold(federation: Federation, config: Any) -> None:
    """Every update has arrived; the coordinator then receives the report of the last one."""
    await federation.create(config)
    agents = federation.start_agents(2)
    last = federation.agent("client-2", script={0: "upload"})
    await federation.status(lambda s: [c.phase for c in s.clients] == ["done", "done", "idle"])
    await last.uploaded.wait()
    await federation.stop_aggregator()
    done = pb.TaskDone(run=RUN)
    done.report.client = last.name
    await last.send(done=done)
    assert 2 == len(agents)


@asynchronous
async def test_a_run_waits_for_its_aggregator_and_says_so(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await lose_an_aggregator_before_the_fold(federation, run_config(evaluate_every=0))
        status = await federation.status(lambda s: "does not answer" in s.message)
        assert ("fold", pb.RUN_PHASE_RUNNING) == (status.round_phase, status.phase)
        assert federation.aggregators[0] in status.message
        await federation.start_aggregator()
        records = await federation.finished()
        assert [3, 3, 3] == [record.num_updates for record in records]
        assert same_bits(expected_model(), await federation.model())


@asynchronous
async def test_a_run_whose_aggregator_is_away_can_be_stopped(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await lose_an_aggregator_before_the_fold(federation, run_config(evaluate_every=0))
        await federation.status(lambda s: "does not answer" in s.message)
        await federation.control(pb.RUN_ACTION_STOP)
        assert [] == await federation.finished()


@asynchronous
async def test_a_run_that_is_stopped_at_once_waits_for_no_aggregator(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await lose_an_aggregator_before_the_fold(federation, run_config(evaluate_every=0))
        await federation.status(lambda s: "does not answer" in s.message)
        status = await federation.control(pb.RUN_ACTION_STOP_NOW)
        assert pb.RUN_PHASE_STOPPED == status.phase
        assert "stopped in round 1, which was not closed" == status.message


@asynchronous
async def test_an_open_round_can_be_given_up(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config())
        agents = federation.start_agents(3)
        for agent in agents:
            agent.hold.clear()
        await agents[0].until("task")
        assert pb.RUN_PHASE_STOPPED == (await federation.control(pb.RUN_ACTION_STOP_NOW)).phase
        await agents[0].until("ended")


@asynchronous
async def test_a_run_whose_model_is_lost_pauses_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await lose_an_aggregator_before_the_fold(federation, run_config(evaluate_every=0))
        await federation.start_aggregator(folder="another")
        status = await federation.status(lambda s: s.phase == pb.RUN_PHASE_PAUSED)
        assert f"{federation.aggregators[0]} refused with NOT_FOUND" in status.message
        assert "has its data directory been lost or changed?" in status.message
        assert "`fedel runs resume` tries again" in status.message
        await federation.stop_aggregator()
        await federation.start_aggregator()
        await federation.restart_coordinator()
        await federation.status(lambda s: s.phase == pb.RUN_PHASE_PAUSED)
        await federation.control(pb.RUN_ACTION_RESUME)
        records = await federation.finished()
        assert [3, 3, 3] == [record.num_updates for record in records]
        assert same_bits(expected_model(), await federation.model())


@asynchronous
async def test_an_unexpected_error_pauses_the_run(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=1, evaluate_every=0))
        planner = federation.coordinator.runs[RUN].engine.planner
        kept, planner.plan = planner.plan, _broken
        federation.agent("client-0")
        status = await federation.status(lambda s: s.phase == pb.RUN_PHASE_PAUSED)
        assert "round 1: IndexError: list index out of range" in status.message
        planner.plan = kept
        await federation.control(pb.RUN_ACTION_RESUME)
        assert 1 == (await federation.finished())[0].num_updates


@asynchronous
async def test_metrics_and_files_that_fail_hold_no_round(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    async with Federation(tmp_path, runs_dir=folder) as federation:
        await federation.create(run_config(num_rounds=2, evaluate_every=0))
        run = federation.coordinator.runs[RUN]
        run.services.metrics.observe_round = _broken
        run.keeper.directory.append = _broken
        agents = federation.start_agents(3)
        await agents[0].until("closed", round_num=0)
        status = await federation.status(lambda s: "the run goes on" in s.message or s.model_version == 2)
        assert "cannot write to" in status.message or status.model_version == 2
        assert 2 == len(await federation.finished())


def _broken(*_: Any, **__: Any) -> Any:
    raise IndexError("list index out of range")


class AwayAtTimes:
    """A store that does not answer every third write of a round or a phase."""

    def __init__(self, inner: SqlStore) -> None:
        self.inner, self.calls = inner, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)
        if not name.endswith(("_round", "_phase")):
            return call

        def sometimes(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls % 3 == 0:
                raise StoreUnavailable("away for a moment")
            return call(*arguments)

        return sometimes


@asynchronous
async def test_a_run_survives_a_database_that_is_away_for_a_moment(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.stop_coordinator()
        store = AwayAtTimes(SqlStore(federation.settings["database_url"]))
        await federation.start_coordinator(store=store)
        await federation.create(run_config(evaluate_every=0))
        federation.start_agents(3)
        records = await federation.finished()
        assert [0, 1, 2] == [record.round for record in records]
        assert same_bits(expected_model(), await federation.model())
        assert store.calls > 12


@asynchronous
async def test_an_agent_reconnects_if_its_report_cannot_be_kept(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=1, evaluate_every=0))
        agent = federation.agent("client-0")
        agent.hold.clear()
        await agent.until("task")
        kept, federation.coordinator.store.put_report = federation.coordinator.store.put_report, _away
        agent.hold.set()
        await agent._task
        assert "UNAVAILABLE" == agent.error.name
        federation.coordinator.store.put_report = kept
        agent.start()
        assert 1 == (await federation.finished())[0].num_updates


def _away(_row: Any) -> None:
    raise StoreUnavailable("away for a moment")


@asynchronous
async def test_an_aggregator_that_was_away_hears_of_the_end_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise StoppedWaiting

    told = tmp_path / "aggregator-0/runs" / RUN / "ended"
    async with Federation(tmp_path) as federation:
        await federation.create(run_config())
        with monkeypatch.context() as patch:
            patch.setattr(Shards, "end", away)
            await federation.control(pb.RUN_ACTION_STOP)
            await federation.finished()
            await federation.stop_coordinator()
        assert not told.exists()
        await federation.start_coordinator()
        await asyncio.wait_for(federation.coordinator._ending or asyncio.sleep(0), STEP_SECONDS)
        assert told.exists()
