"""Who may join, who counts as present, and what a session receives when it ends."""

from __future__ import annotations

import asyncio
import gc
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from fedel_coordinator.errors import SessionSilent
from fedel_coordinator.sessions import Device, Sessions
from grpc import aio

from fedel.types import TimingProfile
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.protocol import PROTOCOL
from tests.services.coordinator.support import (
    RUN,
    SPEC,
    STEP_SECONDS,
    Federation,
    asynchronous,
    run_config,
    trainers,
    until,
)


@asynchronous
async def test_another_model_is_refused_naming_both_digests(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(min_clients=1))
        agent = federation.agent("client-0")
        agent.digest = "0123456789abcdef"
        refused = await agent.until("refused")
        assert RUN == refused.run
        assert "0123456789abcdef" in refused.reason
        assert SPEC.digest in refused.reason
        assert [] == agent.kinds("task")
        assert 1 == federation.refused("join")


def _without_a_tensor(profile: TimingProfile) -> TimingProfile:
    return replace(profile, tensors=profile.tensors[1:])


def _with_a_negative_time(profile: TimingProfile) -> TimingProfile:
    first = replace(profile.tensors[0], grad_seconds=-1.0)
    return replace(profile, tensors=(first, *profile.tensors[1:]))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [(_without_a_tensor, "6 blocks and 14 weights"), (_with_a_negative_time, "grad_seconds is -1")],
)
@asynchronous
async def test_a_profile_that_would_stop_every_plan_is_refused(tmp_path: Path, spoil, complaint: str) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(min_clients=1))
        trainer = trainers()["client-0"]
        agent = federation.agent("client-0", replace(trainer, profile=spoil(trainer.profile)))
        assert complaint in (await agent.until("refused")).reason


@asynchronous
async def test_a_client_without_samples_is_refused(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(min_clients=1))
        agent = federation.agent("client-0", replace(trainers()["client-0"], num_samples=0))
        assert "0 training samples" in (await agent.until("refused")).reason


@asynchronous
async def test_joining_an_unknown_run_is_refused_and_the_session_goes_on(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        agent = federation.agent("client-0")
        assert 1.0 == (await agent.until("welcome")).heartbeat_seconds
        await agent.send(join=pb.Join(run="nothing"))
        assert "no live run 'nothing'" in (await agent.until("refused")).reason
        await federation.create(run_config())
        assert RUN == (await agent.until("run")).run


@asynchronous
async def test_a_run_is_offered_to_agents_that_come_later(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config())
        offer = await federation.agent("client-0").until("run")
        assert SPEC.digest == offer.model_digest
        assert [(federation.aggregators[0], [])] == [(s.address, list(s.tensors)) for s in offer.shards]
        assert offer.instance


@asynchronous
async def test_a_newer_session_of_the_same_name_replaces_the_older(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=2, evaluate_every=0))
        older = federation.agent("client-0")
        await older.until("run")
        newer = federation.agent("client-0")
        await newer.until("run")
        await asyncio.wait_for(older._task, STEP_SECONDS)
        assert grpc.StatusCode.ALREADY_EXISTS == older.error
        assert "another agent opened a session as client 'client-0'" in older.why
        federation.agent("client-1")
        assert 2 == (await federation.finished())[0].num_updates
        assert [] == older.kinds("task")


@asynchronous
async def test_sessions_that_replace_each_other_leave_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A message that arrives as its session ends is read by nobody."""

    async def talk(federation: Federation) -> None:
        call = federation.stub.Session()
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(pb.SessionRequest(hello=pb.Hello(client="one", protocol=PROTOCOL)))
            for _ in range(20):
                await call.write(pb.SessionRequest(heartbeat=pb.Heartbeat()))
        call.cancel()

    async with Federation(tmp_path) as federation:
        for _ in range(10):
            await asyncio.gather(*(talk(federation) for _ in range(8)))
    gc.collect()
    assert [] == [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "first",
    [
        pb.SessionRequest(heartbeat=pb.Heartbeat()),
        pb.SessionRequest(hello=pb.Hello()),
        pb.SessionRequest(hello=pb.Hello(client="a\0b")),
    ],
    ids=["no-hello", "no-name", "odd-name"],
)
@asynchronous
async def test_a_session_begins_with_hello_and_a_name(tmp_path: Path, first: pb.SessionRequest) -> None:
    async with Federation(tmp_path) as federation:
        call = federation.stub.Session(iter([first]))
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        assert grpc.StatusCode.INVALID_ARGUMENT == caught.value.code()


@asynchronous
async def test_a_graceful_leave_counts_at_once(tmp_path: Path) -> None:
    async with Federation(tmp_path, heartbeat_seconds=100.0) as federation:
        await federation.create(run_config(num_rounds=2, evaluate_every=0))
        agents = federation.start_agents(2)
        leaver = federation.agent("client-2", script={0: "silent"})
        await leaver.until("task", round_num=0)
        await leaver.leave()
        records = await federation.finished()
        assert [(3, 2), (2, 2)] == [(record.num_tasks, record.num_updates) for record in records]
        assert leaver.error is None
        assert 2 == len(agents[0].kinds("task"))


@asynchronous
async def test_a_broken_stream_is_not_a_goodbye(tmp_path: Path) -> None:
    async with Federation(tmp_path, heartbeat_seconds=100.0) as federation:
        await federation.create(run_config(num_rounds=2, evaluate_every=0))
        federation.start_agents(2)
        breaker = federation.agent("client-2", script={0: "silent"})
        await breaker.until("task", round_num=0)
        await breaker.drop()
        await federation.status(lambda s: [c.connected for c in s.clients] == [True, True, False])
        breaker.script.clear()
        breaker.start()
        records = await federation.finished()
        assert [(3, 3), (3, 3)] == [(record.num_tasks, record.num_updates) for record in records]


MANY_AGENTS = """
import asyncio, sys
from types import SimpleNamespace
from fedel.wire.channel import connect
from tests.services.coordinator.support import ScriptedAgent, trainers

async def main():
    there = SimpleNamespace(address=sys.argv[1], connect=lambda address, *_: connect(address))
    agents = [ScriptedAgent(there, f"client-{i:02d}", trainers()["client-0"]).start() for i in range(25)]
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynchronous
async def test_killed_agents_do_not_count_as_left(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(min_clients=100))
        agents = await asyncio.create_subprocess_exec(sys.executable, "-c", MANY_AGENTS, federation.address)
        await federation.status(lambda s: len(s.clients) == 25)
        agents.kill()
        await agents.wait()
        await federation.status(lambda s: not any(c.connected for c in s.clients))
        assert not any(member.has_left for member in federation.coordinator.runs[RUN].state.members.values())
        assert not any(row.has_left for row in federation.coordinator.store.clients(RUN))


@asynchronous
async def test_a_client_that_left_may_come_back(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=2, evaluate_every=0))
        agent = federation.agent("client-0")
        await federation.status(lambda s: len(s.clients) == 1)
        await agent.leave()
        federation.agent("client-1")
        await federation.status(
            lambda s: s.message.startswith("waits for 1 more client; ") and len(s.clients) == 2
        )
        agent.start()
        assert 2 == (await federation.finished())[0].num_updates


@asynchronous
async def test_a_silent_client_gets_no_more_tasks(tmp_path: Path) -> None:
    now = [100.0]
    async with Federation(tmp_path, silent_heartbeats=3.0) as federation:
        await federation.stop_coordinator()
        await federation.start_coordinator(monotonic=lambda: now[0])
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(2)
        agents[0].hold.clear()
        gone = federation.agent("client-2", script={0: "fail"})
        run = federation.coordinator.runs[RUN]
        await until(lambda: run.state.open is not None and "client-2" in run.state.open.lost, run)
        await gone.drop()
        now[0] += 2.5
        for agent in agents:
            await agent.send(heartbeat=pb.Heartbeat())
        await federation.status(lambda s: [c.silent_seconds for c in s.clients] == [0.0, 0.0, 2.5])
        now[0] += 1
        agents[0].hold.set()
        records = await federation.finished()
        assert [3, 2, 2] == [record.num_tasks for record in records]


@asynchronous
async def test_a_run_goes_on_when_a_client_that_was_silent_is_heard_again(tmp_path: Path) -> None:
    now = [100.0]
    async with Federation(tmp_path, silent_heartbeats=30.0) as federation:
        await federation.stop_coordinator()
        await federation.start_coordinator(monotonic=lambda: now[0])
        await federation.create(run_config(num_rounds=1, min_clients=1, evaluate_every=0))
        await federation.control(pb.RUN_ACTION_PAUSE)
        agent = federation.agent("client-0")
        await federation.status(lambda s: len(s.clients) == 1)
        now[0] += 100
        run = federation.coordinator.runs[RUN]
        run.wake()
        await until(lambda: run.state.members["client-0"].silent, run)
        await federation.control(pb.RUN_ACTION_RESUME)
        await federation.status(lambda s: s.message.startswith("waits for 1 more client; "))
        await agent.send(heartbeat=pb.Heartbeat())
        assert 1 == (await federation.finished())[0].num_updates


def test_presence_ends_with_silence_and_starts_with_the_process() -> None:
    now = [100.0]
    sessions = Sessions(15.0, lambda: now[0])
    assert sessions.present("known-from-the-store")
    now[0] += 10
    sessions.heard("beating")
    now[0] += 6
    assert not sessions.present("known-from-the-store")
    assert sessions.present("beating")
    assert 6.0 == sessions.silent_for("beating")


@asynchronous
async def test_closing_an_older_session_does_not_close_the_newer_one() -> None:
    sessions = Sessions(15.0)
    older = sessions.open("one", Device())
    newer = sessions.open("one", Device())
    newer.joined.add(RUN)
    sessions.close(older)
    assert older.superseded
    assert sessions.ready("one", RUN)
    assert 1 == sessions.num_sessions


@asynchronous
async def test_a_session_that_says_nothing_for_long_is_ended() -> None:
    now = [0.0]
    sessions = Sessions(1.0, clock=lambda: now[0])
    silent, other = sessions.open("silent", Device()), sessions.open("other", Device())
    now[0] = 20.0
    sessions.heard("other")
    sessions.end_silent()
    assert silent.error is None
    now[0] = 20.5
    sessions.end_silent()
    assert isinstance(silent.error, SessionSilent)
    assert silent.broken.is_set()
    assert other.error is None
