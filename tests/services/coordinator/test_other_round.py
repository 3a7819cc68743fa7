"""A database and an aggregator that do not belong together: the run pauses, and says what to do."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

from fedel.v1 import coordinator_pb2 as pb
from tests.services.coordinator.support import RUN, Federation, asynchronous, run_config, trainers
from tests.services.coordinator.test_rounds import expected_model
from tests.strategies.fakes import same_bits


async def play_until_round(federation: Federation, number: int) -> None:
    """Every client has its task of this round, and nothing is done about it; then all servers end."""
    agents = federation.start_agents(3, script={number: "silent"})
    for agent in agents:
        await agent.until("task", round_num=number)
    await stop(federation)


async def stop(federation: Federation) -> None:
    for agent in federation.agents:
        await agent.drop()
    federation.agents.clear()
    await federation.stop_coordinator()
    await federation.stop_aggregator()


async def start(federation: Federation) -> None:
    await federation.start_aggregator()
    await federation.start_coordinator()


def replace_by_copy(folder: Path, name: str) -> None:
    target, copy = folder / name, folder / "copy" / name
    if copy.is_dir():
        shutil.rmtree(target)
        shutil.copytree(copy, target)
    else:
        shutil.copy(copy, target)


def copy_all(folder: Path) -> None:
    """Of what the servers keep."""
    shutil.copytree(folder / "aggregator-0", folder / "copy" / "aggregator-0")
    shutil.copy(folder / "coordinator.db", folder / "copy" / "coordinator.db")


@asynchronous
async def test_an_aggregator_that_is_behind_is_named_and_the_run_stops_at_once(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=6, evaluate_every=0))
        await play_until_round(federation, 1)
        copy_all(tmp_path)
        await start(federation)
        await play_until_round(federation, 4)
        replace_by_copy(tmp_path, "aggregator-0")
        await start(federation)
        federation.start_agents(3)
        status = await federation.status(lambda s: s.phase == pb.RUN_PHASE_PAUSED)
        named = f"aggregator {federation.aggregators[0]} is at round 1 of run '{RUN}', the database at 4"
        assert status.message.startswith(f"{named}: restore both from one backup; ")
        await federation.control(pb.RUN_ACTION_STOP)
        await asyncio.wait_for(federation.finished(), 5)
        ended = (await federation.stub.ListRuns(pb.ListRunsRequest())).runs[0]
        assert pb.RUN_PHASE_STOPPED == ended.phase


@asynchronous
async def test_an_aggregator_that_is_ahead_is_named_and_the_run_goes_on_once_it_is_not(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(evaluate_every=0, min_reports=3))
        await play_until_round(federation, 0)
        copy_all(tmp_path)
        await start(federation)
        await play_until_round(federation, 2)
        replace_by_copy(tmp_path, "coordinator.db")
        await start(federation)
        status = await federation.status(lambda s: s.phase == pb.RUN_PHASE_PAUSED)
        assert f"is at round 2 of run '{RUN}', the database at 0: restore both" in status.message
        await stop(federation)
        replace_by_copy(tmp_path, "aggregator-0")
        await start(federation)
        federation.start_agents(3)
        await federation.status(lambda s: len(s.clients) == 3)
        await federation.control(pb.RUN_ACTION_RESUME)
        await federation.finished()
        assert same_bits(expected_model(), await federation.model())


@asynchronous
async def test_an_aggregator_that_is_one_round_ahead_gives_its_answer_again(tmp_path: Path) -> None:
    """As after a copy of the database that was made a moment before that of the models. The clients would not
    train the same again: a run by the clock never does."""
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=2, evaluate_every=0))
        await play_until_round(federation, 0)
        copy_all(tmp_path)
        await start(federation)
        await play_until_round(federation, 1)
        replace_by_copy(tmp_path, "coordinator.db")
        await start(federation)
        for name, trainer in list(trainers().items())[:3]:
            federation.agent(name, replace(trainer, data_seed=trainer.data_seed + 1000))
        records = await federation.finished()
        assert [3, 3] == [record.num_updates for record in records]
