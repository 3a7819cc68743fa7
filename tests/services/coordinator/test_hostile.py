"""One agent that says what cannot be true, too much, or nothing: nobody else notices."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fedel_coordinator.sessions import MAX_OUTBOX
from grpc import aio

from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.protocol import PROTOCOL
from tests.services.coordinator.support import (
    RUN,
    STEP_SECONDS,
    Federation,
    ScriptedAgent,
    asynchronous,
    run_config,
    trainers,
)
from tests.services.coordinator.test_rounds import SOON, expected_model
from tests.strategies.fakes import same_bits


def done_of(agent: ScriptedAgent, **fields: Any) -> pb.TaskDone:
    done = pb.TaskDone(run=RUN, **fields)
    done.report.client, done.report.num_steps = agent.name, 1
    return done


async def with_an_evil_agent(federation: Federation, message: pb.TaskDone) -> ScriptedAgent:
    """Two honest agents, and one that sends a message when it has its task."""
    await federation.create(run_config(num_rounds=2, evaluate_every=0))
    federation.start_agents(2)
    evil = federation.agent("client-2", script={0: "silent", 1: "silent"})
    await evil.until("task")
    message.report.client = evil.name
    await evil.send(done=message)
    return evil


@pytest.mark.parametrize(
    "message",
    [
        pb.TaskDone(run=RUN, bytes_up=-5),
        pb.TaskDone(run=RUN, phases=pb.PhaseSeconds(train=math.nan)),
        pb.TaskDone(run=RUN, bytes_down=2**62),
    ],
    ids=["bytes", "phases", "too-many-bytes"],
)
@asynchronous
async def test_a_result_that_cannot_be_true_stops_nothing(tmp_path: Path, message: pb.TaskDone) -> None:
    async with Federation(tmp_path) as federation:
        evil = await with_an_evil_agent(federation, message)
        await evil.until("task", round_num=1)
        message.report.round_num = 1
        await evil.send(done=message)
        records = await federation.finished()
        assert [["client-0", "client-1"]] * 2 == [[c.client for c in record.clients] for record in records]
        assert "its report cannot be used" in records[0].refused["client-2"]
        assert 2 == federation.refused("done")


@asynchronous
async def test_an_odd_sensor_is_left_out(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=1, evaluate_every=0))
        agent = federation.agent("client-0", script={0: "upload"})
        await asyncio.wait_for(agent.uploaded.wait(), STEP_SECONDS)
        device = pb.DeviceState(energy_joules=-1.0, power_watts=7.0)
        await agent.send(done=done_of(agent, device=device))
        (record,) = await federation.finished()
        assert (None, 7.0) == (record.clients[0].device.energy_joules, record.clients[0].device.power_watts)


@asynchronous
async def test_a_claim_without_an_update_does_not_close_a_round(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        rounds = {"num_participants": 1, "over_select": 3.0, "evaluate_every": 0}
        await federation.create(run_config(num_rounds=1, **rounds))
        honest = federation.start_agents(2)
        for agent in honest:
            agent.hold.clear()
        liar = federation.agent("client-2", script={0: "silent"})
        await liar.until("task")
        await liar.send(done=done_of(liar))
        await federation.until_lost("client-2", "its update is missing")
        for agent in honest:
            agent.hold.set()
        (record,) = await federation.finished()
        assert 1 <= record.num_updates <= 2
        assert "client-2" not in [entry.client for entry in record.clients]


@asynchronous
async def test_a_round_that_nobody_answers_pauses_the_run(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=1, max_repeats=1, **SOON))
        agent = federation.agent("client-0", script={0: "silent"})
        status = await federation.status(lambda s: s.phase == pb.RUN_PHASE_PAUSED)
        assert "round 1 got 0 of 1 updates in 2 deadlines" in status.message
        assert "`fedel runs resume`" in status.message
        agent.script.clear()
        await federation.control(pb.RUN_ACTION_RESUME)
        await agent.drop()
        agent.start()
        assert 1 == (await federation.finished())[0].num_updates


@asynchronous
async def test_a_test_by_a_stranger_does_not_count(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=2))
        tester = federation.agent("client-0", accuracies={1: 0.5})
        tester.mute_evaluations = True
        evil = federation.agent("client-1")
        await tester.until("evaluate")
        lie = pb.EvaluationDone(run=RUN, model_version=1, accuracy=7.0)
        await evil.send(evaluation=lie)
        lie.accuracy = 1.0
        await evil.send(evaluation=lie)
        await evil.send(answer=pb.TaskAnswer(run="nothing"))
        await evil.until("refused")
        await tester.send(evaluation=pb.EvaluationDone(run=RUN, model_version=1, accuracy=0.5, loss=1.0))
        (record,) = await federation.finished()
        assert (0.5, 2) == (record.accuracy, federation.refused("evaluation"))


@asynchronous
async def test_long_texts_are_cut(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=2, evaluate_every=0))
        federation.agent("client-0").hold.clear()
        evil = federation.agent("client-1", script={0: "silent"})
        await evil.until("task")
        await evil.send(failed=pb.TaskFailed(run=RUN, round_num=0, message="\x1b[2J" + "x" * 900_000))
        why = await federation.until_lost("client-1", "xxx")
        assert len(why) < 1100
        assert "\x1b" not in why


async def ended(agent: ScriptedAgent) -> grpc.StatusCode | None:
    await asyncio.wait_for(asyncio.gather(agent._task, return_exceptions=True), STEP_SECONDS)
    return agent.error


@asynchronous
async def test_a_session_with_many_refused_messages_ends(tmp_path: Path) -> None:
    async with Federation(tmp_path, max_refused_messages=5) as federation:
        agent = federation.agent("client-0")
        await agent.until("welcome")
        for _ in range(5):
            await agent.send(answer=pb.TaskAnswer(run="nothing"))
        assert grpc.StatusCode.RESOURCE_EXHAUSTED == await ended(agent)
        assert "5 of its messages were refused" in agent.why


@asynchronous
async def test_a_session_that_sends_too_much_for_long_ends(tmp_path: Path) -> None:
    """One message at a time: a client that writes on a call that has ended does not see the server's status."""
    async with Federation(tmp_path, max_messages_per_second=0.5) as federation:
        agent = federation.agent("client-0")
        await agent.until("welcome")
        session = federation.coordinator.sessions._sessions["client-0"]
        while not session.broken.is_set():
            tokens = session._tokens
            await agent.send(heartbeat=pb.Heartbeat())
            while session._tokens == tokens:
                await asyncio.sleep(0)
        assert grpc.StatusCode.RESOURCE_EXHAUSTED == await ended(agent)
        assert "more than 0.5 messages a second" in agent.why


@asynchronous
async def test_a_session_that_says_nothing_ends(tmp_path: Path) -> None:
    async with Federation(tmp_path, hello_seconds=0.1) as federation, connect(federation.address) as channel:
        call = CoordinatorServiceStub(channel).Session()
        with pytest.raises(aio.AioRpcError, match=r"no Hello within 0.1 s") as refused:
            await asyncio.wait_for(call.read(), STEP_SECONDS)
        assert grpc.StatusCode.DEADLINE_EXCEEDED == refused.value.code()


@asynchronous
async def test_an_agent_that_does_not_read_is_let_go(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation, connect(federation.address) as channel:
        call = CoordinatorServiceStub(channel).Session()
        await call.write(pb.SessionRequest(hello=pb.Hello(client="lazy", protocol=PROTOCOL)))
        await call.read()
        session = federation.coordinator.sessions._sessions["lazy"]
        big = pb.SessionResponse(refused=pb.JoinRefused(reason="x" * 100_000))
        for _ in range(MAX_OUTBOX + 100):
            session.push(big)
        while federation.coordinator.sessions.num_sessions:
            await asyncio.sleep(0.01)
        assert session._outbox.qsize() <= MAX_OUTBOX + 1


@asynchronous
async def test_a_message_of_megabytes_is_refused(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        agent = federation.agent("client-0")
        await agent.until("welcome")
        await agent.send(failed=pb.TaskFailed(run=RUN, message="x" * 2_000_000))
        assert grpc.StatusCode.RESOURCE_EXHAUSTED == await ended(agent)


@asynchronous
async def test_a_run_takes_a_limited_number_of_clients(tmp_path: Path) -> None:
    async with Federation(tmp_path, max_clients=2) as federation:
        await federation.create(run_config(min_clients=3))
        federation.start_agents(2)
        await federation.status(lambda s: len(s.clients) == 2)
        late = federation.agent("client-2")
        assert "the run has 2 clients" in (await late.until("refused")).reason


@asynchronous
async def test_a_client_that_never_counted_is_forgotten(tmp_path: Path) -> None:
    async with Federation(
        tmp_path, heartbeat_seconds=0.1, silent_heartbeats=1.0, forget_seconds=0.2
    ) as federation:
        await federation.create(run_config(min_clients=3))
        agent = federation.agent("client-0")
        await federation.status(lambda s: len(s.clients) == 1)
        await agent.drop()
        run = federation.coordinator.runs[RUN]
        while run.state.members:
            run.wake()
            await asyncio.sleep(0.05)
        assert [] == federation.coordinator.store.clients(RUN)


@asynchronous
async def test_a_profile_a_thousand_times_too_fast_takes_no_work_away(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=4, evaluate_every=0))
        honest = federation.start_agents(3)
        trainer = trainers()["client-3"]
        federation.agent("client-3", replace(trainer, profile=trainer.profile.scaled(1e-3)))
        task = await honest[0].until("task")
        assert task.budget_seconds > expected_budget() / 4
        (record,) = await federation.finished()
        assert not all(entry.over_budget for entry in record.clients)


def expected_budget() -> float:
    from fedel.core.timing import budget, full_steps

    return budget(full_steps([trainer.profile for trainer in list(trainers().values())[:3]]))


@asynchronous
async def test_an_honest_run_is_not_disturbed(tmp_path: Path) -> None:
    """Everything at once, by a client that is not in the plan: the model has the bits of a run without it."""
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(evaluate_every=0))
        evil = federation.agent("evil", trainers()["client-5"])
        evil.digest = "wrong"
        await evil.until("refused")
        federation.start_agents(3)
        for round_num in range(3):
            done = done_of(evil, bytes_up=-1)
            done.report.round_num = round_num
            await evil.send(done=done)
            await evil.send(progress=pb.TaskProgress(run=RUN, round_num=round_num, phase="x" * 1000))
            await evil.send(failed=pb.TaskFailed(run=RUN, round_num=-1, message="x"))
            await evil.send(evaluation=pb.EvaluationDone(run=RUN, model_version=round_num, accuracy=9.0))
        records = await federation.finished()
        assert [3, 3, 3] == [record.num_updates for record in records]
        assert same_bits(expected_model(), await federation.model())


@asynchronous
async def test_a_session_that_falls_silent_is_ended(tmp_path: Path) -> None:
    async with Federation(tmp_path, heartbeat_seconds=0.01, silent_heartbeats=1) as federation:
        call = federation.stub.Session()
        await call.write(pb.SessionRequest(hello=pb.Hello(client="client-0", protocol=PROTOCOL)))
        assert (await call.read()).HasField("welcome")
        with pytest.raises(aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), STEP_SECONDS)
        assert grpc.StatusCode.DEADLINE_EXCEEDED is caught.value.code()
        assert 0 == federation.coordinator.sessions.num_sessions
