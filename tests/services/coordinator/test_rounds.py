"""A round from the plan to the next model, with real servers and scripted agents."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fedel.strategies.base import DEVICE_CLOCK
from fedel.types import Tensors
from fedel.v1 import coordinator_pb2 as pb
from tests.services.coordinator.support import STEP_SECONDS, Federation, asynchronous, run_config, trainers
from tests.simulation.fakes import play
from tests.strategies.fakes import same_bits

SOON = {"deadline_floor_seconds": 0.3, "deadline_factor": 1e-6, "evaluate_every": 0}
"""Rounds whose deadline passes while a test waits."""


def expected_model(num_rounds: int = 3, num_clients: int = 3, name: str = "fedel") -> Tensors:
    """The same rounds in a simulation."""
    clients = dict(list(trainers().items())[:num_clients])
    return play(
        run_config({"name": name}, num_rounds=num_rounds, min_clients=1), clients, scope=DEVICE_CLOCK
    ).model


@pytest.mark.parametrize("strategy", ["fedel", "pyramidfl", "fednova"])
@asynchronous
async def test_three_rounds_make_the_model_of_the_simulation(tmp_path: Path, strategy: str) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config({"name": strategy}, evaluate_every=0))
        federation.start_agents(3)
        records = await federation.finished()
        assert [0, 1, 2] == [record.round for record in records]
        assert [3, 3, 3] == [record.num_updates for record in records]
        assert same_bits(expected_model(name=strategy), await federation.model())


@asynchronous
async def test_two_aggregators_make_the_same_model_as_one(tmp_path: Path) -> None:
    async with Federation(tmp_path, num_aggregators=2) as federation:
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(3)
        await federation.finished()
        offer = await agents[0].until("run")
        assert federation.aggregators == [shard.address for shard in offer.shards]
        assert all(shard.tensors for shard in offer.shards)
        assert same_bits(expected_model(), await federation.model())


@asynchronous
async def test_an_update_that_only_one_of_two_aggregators_has_is_left_out(tmp_path: Path) -> None:
    async with Federation(tmp_path, num_aggregators=2) as federation:
        await federation.create(run_config(num_rounds=1, min_reports=2, **SOON))
        others = federation.start_agents(2)
        for agent in others:
            agent.hold.clear()
        half = federation.agent("client-2", script={0: "half"})
        await asyncio.wait_for(half.uploaded.wait(), STEP_SECONDS)
        for agent in others:
            agent.hold.set()
        records = await federation.finished()
        assert ["client-0", "client-1"] == [entry.client for entry in records[0].clients]
        assert not (await half.until("closed", round_num=0)).counted
        assert same_bits(expected_model(num_rounds=1, num_clients=2), await federation.model())


@asynchronous
async def test_an_agent_receives_its_tasks_the_closed_rounds_and_the_end(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(3)
        ended = await agents[0].until("ended")
        assert pb.RUN_PHASE_FINISHED == ended.phase
        assert [0, 1, 2] == [task.model_version for task in agents[0].kinds("task")]
        assert [-1, 0, 1] == [task.accepted_round for task in agents[0].kinds("task")]
        assert [(0, 1, True), (1, 2, True), (2, 3, True)] == [
            (c.round_num, c.model_version, c.counted) for c in agents[0].kinds("closed")
        ]


@asynchronous
async def test_the_deadline_closes_a_round_without_a_silent_client(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_reports=2, **SOON))
        federation.start_agents(2)
        silent = federation.agent("client-2", script={0: "silent"})
        records = await federation.finished()
        assert ["client-0", "client-1"] == [entry.client for entry in records[0].clients]
        assert (3, 2) == (records[0].num_tasks, records[0].num_updates)
        assert not (await silent.until("closed", round_num=0)).counted


@asynchronous
async def test_a_round_with_too_few_reports_waits_beyond_its_deadline(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_reports=2, **SOON))
        federation.agent("client-0")
        slow = federation.agent("client-1")
        slow.hold.clear()
        federation.agent("client-2", script={0: "silent"})
        status = await federation.status(lambda s: "1 of 2 reports" in s.message)
        assert pb.RUN_PHASE_RUNNING == status.phase
        slow.hold.set()
        records = await federation.finished()
        assert ["client-0", "client-1"] == [entry.client for entry in records[0].clients]


@asynchronous
async def test_too_few_reports_do_not_close_a_round_that_expects_no_more(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_reports=2, **SOON))
        federation.agent("client-0")
        agents = [federation.agent(f"client-{i}", script={0: "fail"}) for i in (1, 2)]
        await federation.status(lambda s: "1 of 2 reports" in s.message)
        await agents[0].drop()
        agents[0].script.clear()
        agents[0].start()
        records = await federation.finished()
        assert ["client-0", "client-1"] == [entry.client for entry in records[0].clients]


@asynchronous
async def test_a_round_whose_only_client_is_gone_is_given_to_another(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, num_participants=1, min_clients=2, **SOON))
        agents = [federation.agent(f"client-{i}", script={0: "silent"}) for i in range(2)]
        await federation.status(lambda s: s.round_phase == "train")
        (drawn,) = federation.coordinator.runs["night-1"].state.open.tasks
        other = next(agent for agent in agents if agent.name != drawn)
        await next(agent for agent in agents if agent.name == drawn).drop()
        other.script.clear()
        records = await federation.finished()
        assert [other.name] == [entry.client for entry in records[0].clients]


@asynchronous
async def test_over_selection_closes_when_enough_are_back(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        config = run_config(num_rounds=1, num_participants=2, over_select=1.5, evaluate_every=0)
        await federation.create(config)
        federation.start_agents(2)
        slow = federation.agent("client-2")
        slow.hold.clear()
        records = await federation.finished()
        assert (3, 2) == (records[0].num_tasks, records[0].num_updates)
        assert not (await slow.until("closed", round_num=0)).counted


@pytest.mark.parametrize("behaviour", ["decline", "fail"])
@asynchronous
async def test_a_client_that_declines_or_fails_is_not_waited_for(tmp_path: Path, behaviour: str) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=2, evaluate_every=0))
        federation.start_agents(2)
        federation.agent("client-2", script={0: behaviour})
        records = await federation.finished()
        assert [2, 3] == [record.num_updates for record in records]


@asynchronous
async def test_an_acknowledged_update_counts_without_a_report(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_reports=2, **SOON))
        others = federation.start_agents(2)
        for agent in others:
            agent.hold.clear()
        mute = federation.agent("client-2", script={0: "upload"})
        await asyncio.wait_for(mute.uploaded.wait(), STEP_SECONDS)
        for agent in others:
            agent.hold.set()
        records = await federation.finished()
        assert 3 == records[0].num_updates
        assert (await mute.until("closed", round_num=0)).counted
        assert same_bits(expected_model(num_rounds=1), await federation.model())


@asynchronous
async def test_a_client_that_joins_late_takes_part_from_the_next_round_on(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=2, min_clients=2, evaluate_every=0))
        agents = federation.start_agents(2)
        agents[0].hold.clear()
        await agents[0].until("task", round_num=0)
        late = federation.agent("client-2")
        await federation.status(lambda s: len(s.clients) == 3)
        agents[0].hold.set()
        records = await federation.finished()
        assert [2, 3] == [record.num_updates for record in records]
        assert [1] == [task.round_num for task in late.kinds("task")]


@asynchronous
async def test_a_late_update_counts_in_the_next_round_where_the_run_says_so(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        rounds = {"num_rounds": 2, "late": "next", "num_participants": 2, "over_select": 1.5}
        rounds |= {"deadline_factor": 1e-3, "deadline_floor_seconds": 5.0}
        await federation.create(run_config(evaluate_every=0, **rounds))
        agents = federation.start_agents(2)
        late = federation.agent("client-2")
        late.hold.clear()
        agents[1].script[1] = "silent"  # so that round 1 stays open until its deadline
        await late.until("closed", round_num=0)
        late.hold.set()
        records = await federation.finished()
        assert [0] == [task.round_num for task in late.kinds("task")], "it was at work"
        assert [2, 2] == [record.num_updates for record in records]
        assert [0, 1] == [record.num_late for record in records]
        assert ["client-0", "client-2"] == [entry.client for entry in records[1].clients]
        assert 0 < records[1].clients[1].bytes_up


@asynchronous
async def test_a_late_report_of_an_update_in_time_does_not_count_again(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        rounds = {"num_rounds": 2, "late": "next", "num_participants": 2, "over_select": 1.5}
        await federation.create(run_config(evaluate_every=0, **rounds))
        agents = federation.start_agents(2)
        agents[0].hold.clear()
        mute = federation.agent("client-2", script={0: "upload", 1: "silent"})
        await asyncio.wait_for(mute.uploaded.wait(), STEP_SECONDS)
        agents[0].script[1] = "silent"
        agents[0].hold.set()
        in_round_1 = ("train", 1, "done")
        await federation.status(lambda s: (s.round_phase, s.round_num, s.clients[1].phase) == in_round_1)
        word = pb.TaskDone(run="night-1")
        word.report.client, word.report.round_num = "client-2", 0
        await mute.send(done=word)
        assert (await mute.until("closed", 2, round_num=0)).counted
        now = federation.coordinator.runs["night-1"].state.open
        assert (1, "open", {"client-1"}) == (now.round_num, now.status, now.done)


@asynchronous
async def test_an_open_task_is_sent_again_after_a_reconnect_until_it_is_done(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(3)
        agents[1].hold.clear()
        agents[2].script[0] = "silent"
        await federation.status(lambda s: [c.phase for c in s.clients] == ["done", "idle", "idle"])
        agents[2].script.clear()
        for agent in (agents[0], agents[2]):
            await agent.drop()
            agent.start()
        await agents[2].until("task", 2, round_num=0)
        agents[1].hold.set()
        await federation.finished()
        assert 1 == sum(task.round_num == 0 for task in agents[0].kinds("task"))
        assert same_bits(expected_model(), await federation.model())


@asynchronous
async def test_a_device_that_lost_everything_goes_on_from_the_coordinators_copy(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(3)
        agents[2].hold.clear()
        await agents[2].until("task", round_num=0)
        agents[2].hold.set()
        await agents[2].until("closed", round_num=0)
        await agents[2].drop()
        fresh = federation.agent("client-2")
        await federation.finished()
        task = fresh.kinds("task")[0]
        assert task.accepted_round == task.round_num - 1
        assert task.memory.front_block > 0
        assert same_bits(expected_model(), await federation.model())


@asynchronous
async def test_a_message_of_another_clients_task_is_ignored(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, evaluate_every=0))
        agents = federation.start_agents(3)
        for agent in agents:
            agent.hold.clear()
        await agents[0].until("task")
        forged = pb.TaskDone(run="night-1")
        forged.report.client, forged.report.round_num = "client-1", 0
        ahead = pb.TaskDone(run="night-1")
        ahead.report.client, ahead.report.round_num = "client-0", 5
        await agents[0].send(done=forged)
        await agents[0].send(done=ahead)
        await agents[0].send(progress=pb.TaskProgress(run="night-1", round_num=0, phase="train"))
        await federation.status(lambda s: s.clients[0].phase == "train")
        run = federation.coordinator.runs["night-1"]
        assert 2 == federation.refused("done")
        assert not run.state.open.done
