"""Creating, pausing, stopping, listing and watching runs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from fedel_coordinator import servicer
from grpc import aio

from fedel.strategies.base import DEVICE_CLOCK
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.codec import spec_to_pb
from tests.services.coordinator.support import RUN, SPEC, Federation, asynchronous, run_config, trainers
from tests.simulation.fakes import play
from tests.strategies.fakes import same_bits

_SPEC = spec_to_pb(SPEC)


@asynchronous
async def test_creating_the_same_run_again_gives_the_same_answer(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        config = run_config(num_rounds=1, min_clients=1, evaluate_every=0)
        first = await federation.create(config)
        again = await federation.ask_for(config)
        assert (first.run, first.created_at) == (again.run, again.created_at)
        assert pb.RUN_PHASE_WAITING == first.phase
        federation.agent("client-0")
        await federation.finished()
        assert pb.RUN_PHASE_FINISHED == (await federation.ask_for(config)).phase
        await federation.restart_coordinator()
        assert pb.RUN_PHASE_FINISHED == (await federation.ask_for(config)).phase


@asynchronous
async def test_the_name_of_another_run_is_taken(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config())
        with pytest.raises(aio.AioRpcError) as caught:
            await federation.ask_for(run_config(num_rounds=9))
        assert grpc.StatusCode.ALREADY_EXISTS == caught.value.code()
        assert f"run '{RUN}' exists with another configuration" in caught.value.details()
        with pytest.raises(aio.AioRpcError) as caught:
            await federation.ask_for(run_config(), spec=replace(SPEC, tensors=SPEC.tensors[:-1]))
        assert "another model" in caught.value.details()


@asynchronous
async def test_a_run_without_its_model_at_the_aggregators_is_refused(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        with pytest.raises(aio.AioRpcError) as caught:
            await federation.ask_for(run_config())
        assert grpc.StatusCode.FAILED_PRECONDITION == caught.value.code()
        assert f"{federation.aggregators[0]} has no model of run '{RUN}'" in caught.value.details()


@pytest.mark.parametrize(
    ("run", "table", "complaint"),
    [
        ("../evil", {}, "run name '../evil'"),
        ("ok", {"sed": 1}, "unknown key 'sed'; did you mean 'seed'?"),
        ("ok", {"strategy": {"name": "fedal"}}, "strategy 'fedal' is unknown"),
        ("ok", {"rounds": {"num_participants": 2, "min_reports": 3}}, "no round would ever close"),
        (
            "ok",
            {"protection": {"secure": True}, "rounds": {"min_clients": 2}},
            "set rounds.min_clients to 3 or more",
        ),
        ("ok", {"protection": {"secure": True}, "strategy": {"name": "fiarse"}}, "sends parts of tensors"),
        ("ok", {"protection": {"fold": "median"}, "strategy": {"name": "fednova"}}, "has a fold of its own"),
    ],
)
@asynchronous
async def test_a_wrong_configuration_is_refused(tmp_path: Path, run: str, table: dict, complaint: str) -> None:
    async with Federation(tmp_path) as federation:
        with pytest.raises(aio.AioRpcError) as caught:
            await federation.stub.CreateRun(
                pb.CreateRunRequest(run=run, config_json=json.dumps(table), spec=_SPEC)
            )
        assert grpc.StatusCode.INVALID_ARGUMENT == caught.value.code()
        assert complaint in caught.value.details()


@asynchronous
async def test_a_configuration_that_is_not_json_is_refused(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        with pytest.raises(aio.AioRpcError) as caught:
            await federation.stub.CreateRun(pb.CreateRunRequest(run="ok", config_json="{", spec=_SPEC))
        assert "not valid JSON" in caught.value.details()


@asynchronous
async def test_a_paused_run_finishes_its_round_and_opens_no_other_until_resumed(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(3)
        agents[0].hold.clear()
        await agents[0].until("task", round_num=0)
        assert pb.RUN_PHASE_PAUSED == (await federation.control(pb.RUN_ACTION_PAUSE)).phase
        agents[0].hold.set()
        await agents[0].until("closed", round_num=0)
        status = await federation.status(lambda s: s.round_phase == "waiting")
        assert (pb.RUN_PHASE_PAUSED, 1) == (status.phase, status.round_num)
        assert 1 == len(agents[0].kinds("task"))
        assert pb.RUN_PHASE_RUNNING == (await federation.control(pb.RUN_ACTION_RESUME)).phase
        assert 3 == len(await federation.finished())


@asynchronous
async def test_a_run_paused_before_its_first_round_waits_again_when_resumed(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, evaluate_every=0))
        await federation.control(pb.RUN_ACTION_PAUSE)
        agents = federation.start_agents(3)
        await federation.status(lambda s: len(s.clients) == 3)
        assert [] == agents[0].kinds("task")
        assert pb.RUN_PHASE_WAITING == (await federation.control(pb.RUN_ACTION_RESUME)).phase
        assert 1 == len(await federation.finished())


@asynchronous
async def test_a_stopped_run_ends_after_the_open_round(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(3)
        agents[0].hold.clear()
        await agents[0].until("task", round_num=0)
        status = await federation.control(pb.RUN_ACTION_STOP)
        assert pb.RUN_PHASE_RUNNING == status.phase
        assert status.message.startswith("stopped; it ends after the open round")
        agents[0].hold.set()
        assert 1 == len(await federation.finished())
        assert pb.RUN_PHASE_STOPPED == (await agents[0].until("ended")).phase
        assert pb.RUN_PHASE_STOPPED == (await federation.control(pb.RUN_ACTION_STOP)).phase
        with pytest.raises(aio.AioRpcError) as caught:
            await federation.control(pb.RUN_ACTION_RESUME)
        assert grpc.StatusCode.FAILED_PRECONDITION == caught.value.code()


@asynchronous
async def test_a_run_without_clients_can_be_stopped(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config())
        status = await federation.status(lambda s: bool(s.message))
        assert "waits for 3 more clients; no agent is connected" == status.message
        await federation.control(pb.RUN_ACTION_STOP)
        assert [] == await federation.finished()


@asynchronous
async def test_a_run_stops_although_its_round_cannot_close(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        rounds = {"deadline_floor_seconds": 0.2, "deadline_factor": 1e-6}
        await federation.create(run_config(min_clients=1, **rounds))
        agent = federation.agent("client-0", script={0: "silent"})
        await agent.until("task")
        await federation.control(pb.RUN_ACTION_STOP)
        assert [] == await federation.finished()
        status = (await federation.stub.ListRuns(pb.ListRunsRequest())).runs[0]
        assert "stopped in round 1, which was not closed" == status.message


@asynchronous
async def test_two_runs_at_once_do_not_touch_each_other(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config({"name": "fedel"}, evaluate_every=0), "one")
        await federation.create(run_config({"name": "fedavg"}, num_rounds=2, evaluate_every=0), "two")
        federation.start_agents(3)
        one, two = await asyncio.gather(federation.finished("one"), federation.finished("two"))
        assert (["fedel"] * 3, ["fedavg"] * 2) == ([r.strategy for r in one], [r.strategy for r in two])
        clients = dict(list(trainers().items())[:3])
        for name, method, num_rounds in (("one", "fedel", 3), ("two", "fedavg", 2)):
            expected = play(run_config({"name": method}, num_rounds=num_rounds), clients, scope=DEVICE_CLOCK)
            assert same_bits(expected.model, await federation.model(name))


@asynchronous
async def test_runs_are_listed_newest_first_and_the_newest_is_watched_by_default(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        for name in ("one", "two"):
            await federation.create(run_config(), name)
        runs = (await federation.stub.ListRuns(pb.ListRunsRequest())).runs
        assert ["two", "one"] == [status.run for status in runs]
        watch = federation.stub.WatchRun(pb.WatchRunRequest())
        assert "two" == (await watch.read()).status.run
        watch.cancel()


@asynchronous
async def test_an_unknown_run_is_not_found(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        with pytest.raises(aio.AioRpcError) as caught:
            await federation.control(pb.RUN_ACTION_PAUSE, "nothing")
        assert grpc.StatusCode.NOT_FOUND == caught.value.code()
        with pytest.raises(aio.AioRpcError) as caught:
            await federation.stub.WatchRun(pb.WatchRunRequest()).read()
        assert "there is no run yet" == caught.value.details()


@asynchronous
async def test_a_request_without_an_action_is_refused(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config())
        with pytest.raises(aio.AioRpcError) as caught:
            await federation.control(pb.RUN_ACTION_UNSPECIFIED)
        assert grpc.StatusCode.INVALID_ARGUMENT == caught.value.code()


@asynchronous
async def test_a_follower_gets_every_round_once_in_small_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "BATCH_BYTES", 1)
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=4, min_clients=1, evaluate_every=0))
        following = asyncio.create_task(federation.finished())
        federation.agent("client-0")
        expected = [0, 1, 2, 3]
        assert expected == [record.round for record in await following]
        assert expected == [record.round for record in await federation.finished()]
        await federation.restart_coordinator()
        assert expected == [record.round for record in await federation.finished()]


@asynchronous
async def test_the_aggregators_are_listed_as_agents_reach_them(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        listed = await federation.stub.ListAggregators(pb.ListAggregatorsRequest())
        assert federation.aggregators == list(listed.addresses)
        federation.settings["public_aggregators"] = ("outside.example:443",)
        await federation.restart_coordinator()
        listed = await federation.stub.ListAggregators(pb.ListAggregatorsRequest())
        assert ["outside.example:443"] == list(listed.addresses)
