from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from fedel.roles.edge import KeptMemories, run_task
from fedel.roles.planner import memory_of
from fedel.strategies import FedEL
from fedel.types import Memory, SentUpdate, UploadSettings
from fedel.v1 import coordinator_pb2
from fedel.wire.codec import report_from_pb, task_from_pb
from fedel.wire.payload import pack
from tests.agents import trainers
from tests.agents.expected import CLIENT, expected_update, needed_for, same_patches, size_of
from tests.agents.stand_ins import (
    RUN,
    SPEC,
    Federation,
    run_scenario,
    run_table,
    running,
    task_of,
)
from tests.strategies.fakes import initial_model


def test_an_agent_prices_uploads_as_the_simulation_does(tmp_path: Path) -> None:
    """In the bytes that compression makes, which it knows from the job."""
    table, message = json.loads(run_table()), task_of(0)
    table["strategy"]["budget_scope"], table["upload"]["compression"] = "round", "int8"
    message.speed.up_rate = SPEC.num_bytes / 0.3

    def simulated(upload: UploadSettings) -> SentUpdate:
        task, method = task_from_pb(message, SPEC, upload), FedEL(budget_scope="round")
        return run_task(method, task, Memory(), initial_model(), CLIENT, KeptMemories())

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(json.dumps(table))
            fed.coordinator.push(task=message)
            done = await fed.done(0)
        expected, report = simulated(UploadSettings("int8")), report_from_pb(done.report)
        assert (expected.report.selected, expected.report.batches) == (report.selected, report.batches)
        assert pack(expected.patches).num_bytes == done.bytes_up
        assert simulated(UploadSettings()).report.batches < report.batches

    run_scenario(tmp_path, scenario)


def test_task_to_the_bit(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            join = await fed.joined()
            assert (RUN, SPEC.digest, CLIENT.num_samples) == (join.run, join.model_digest, join.num_samples)
            fed.order(0)
            done = await fed.done(0)
        expected = expected_update(0, KeptMemories())
        (update,) = fed.aggregator.updates()
        assert same_patches(expected, update)
        assert expected.report.window == report_from_pb(done.report).window
        assert pack(expected.patches).num_bytes == done.bytes_up == fed.aggregator.bytes_received
        assert size_of(needed_for(done)) == done.bytes_down
        assert done.phases.train > 0
        assert done.report.peak_memory_bytes > 0
        assert [True] == [answer.accepted for answer in fed.coordinator.all("answer")]
        phases = [p.phase for p in fed.coordinator.all("progress")]
        assert ["download", "train", "train", "upload"] == phases
        planned = fed.coordinator.all("progress")[2]
        assert expected.report.selected == tuple(planned.window.selected)

    run_scenario(tmp_path, scenario)


def test_heartbeats_during_a_long_step(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(run_table("held"))
            fed.order(0)
            await asyncio.to_thread(trainers.entered.wait, 10)
            so_far = len(fed.coordinator.all("heartbeat"))
            await fed.coordinator.until("heartbeat", so_far + 3)
            trainers.release.set()
            await fed.done(0)

    run_scenario(tmp_path, scenario)


def test_broken_upload_resumes(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        fed.aggregator.break_after = [2, 1]
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            done = await fed.done(0)
        (update,) = fed.aggregator.updates()
        assert same_patches(expected_update(0, KeptMemories()), update)
        assert pack(update.patches).num_bytes == fed.aggregator.bytes_received == done.bytes_up

    run_scenario(tmp_path, scenario)


def test_coordinator_restart(
    tmp_path: Path,
) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(run_table("counting"))
            fed.order(0)
            first = await fed.done(0)
            await fed.restart_coordinator()
            await fed.joined(run_table("counting"))
            assert first == await fed.done(0)
            fed.order(0)
            assert first == await fed.done(0, number=2)
            fed.order(1, accepted_round=0)
            await fed.done(1)
        assert [100, 101] == trainers.calls

    run_scenario(tmp_path, scenario)


def test_task_survives_a_lost_session(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(run_table("held"))
            fed.order(0)
            await asyncio.to_thread(trainers.entered.wait, 10)
            await fed.restart_coordinator()
            await fed.coordinator.until("hello")
            fed.offer(run_table("held"))
            trainers.release.set()
            await fed.done(0)

    run_scenario(tmp_path, scenario)


def test_lost_round_repeats_from_the_same_memory(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            windows = []
            for round_num, accepted in enumerate((-1, 0, 0, 0, 0, 4)):
                fed.order(round_num, accepted_round=accepted, budget_seconds=0.07)
                windows.append(report_from_pb((await fed.done(round_num)).report).window)
        first, second, *repeated, after = windows
        assert [second] * 3 == repeated
        assert first != second
        assert after not in (first, second)
        assert 3 == len(fed.aggregator.requests), "of a window that is repeated, everything is on disk"

    run_scenario(tmp_path, scenario)


def test_lost_disk_continues_from_the_coordinators_copy(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            report = report_from_pb((await fed.done(0)).report)
        memories = KeptMemories()
        memories.stage(0, memory_of(report))
        expected = expected_update(1, memories, accepted_round=0)
        assert report.window != expected.report.window
        async with running(fed.agent(state_dir=tmp_path / "new")):
            await fed.joined(number=2)
            fed.order(1, accepted_round=0, memory=memory_of(report))
            await fed.done(1)
        assert same_patches(expected, fed.aggregator.updates()[-1])

    run_scenario(tmp_path, scenario)


def test_restarted_agent_sends_its_stored_update(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        fed.aggregator.permits.clear()
        async with running(fed.agent(grace_seconds=0.0)):
            await fed.joined(run_table("counting"))
            fed.order(0)
            await fed.aggregator.waiting.wait()
        fed.aggregator.permits.set()
        async with running(fed.agent()):
            await fed.joined(run_table("counting"), number=2)
            fed.order(0)
            await fed.done(0)
        assert [100] == trainers.calls
        assert same_patches(expected_update(0, KeptMemories()), fed.aggregator.updates()[0])

    run_scenario(tmp_path, scenario)


def test_new_run_of_the_same_name_starts_fresh(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            first = await fed.done(0)
            fed.offer(instance="2")
            await fed.coordinator.until("join", 2)
            fed.order(1, accepted_round=0)
            second = await fed.done(1)
        assert [{-1}, {-1}] == [set(r.have_versions) for r in fed.aggregator.requests]
        assert first.report.window.end_block == second.report.window.end_block

    run_scenario(tmp_path, scenario)


def test_superseded_task_is_given_up(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        agent = fed.agent()
        async with running(agent):
            await fed.joined(run_table("held"))
            fed.order(0)
            await asyncio.to_thread(trainers.entered.wait, 10)
            fed.order(1)
            await fed.coordinator.until("answer", 2)
            trainers.release.set()
            await fed.done(1)
        assert [1] == [u.report.round_num for u in fed.aggregator.updates()]
        assert {"given_up": 1, "done": 1} == agent.counts

    run_scenario(tmp_path, scenario)


def test_closed_round_ends_its_upload(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        fed.aggregator.permits.clear()
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            await fed.aggregator.waiting.wait()
            closed = coordinator_pb2.RoundClosed(run=RUN, round_num=0, model_version=1)
            fed.coordinator.push(closed=closed)
            fed.order(1)
            await fed.coordinator.until("progress", 1, lambda p: p.round_num == 1)
            fed.aggregator.permits.set()
            await fed.done(1)
        assert [1] == [u.report.round_num for u in fed.aggregator.updates()]
        assert ["update-1"] == [p.name for p in tmp_path.glob("*/update-*")]

    run_scenario(tmp_path, scenario)


def test_late_policy_next_keeps_working_on_a_closed_round(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        fed.aggregator.permits.clear()
        async with running(fed.agent()):
            await fed.joined(run_table(late="next"))
            fed.order(0)
            await fed.aggregator.waiting.wait()
            fed.coordinator.push(closed=coordinator_pb2.RoundClosed(run=RUN, round_num=0, model_version=1))
            fed.coordinator.push(evaluate=coordinator_pb2.EvaluationTask(run=RUN, model_version=0))
            fed.aggregator.permits.set()
            await fed.done(0)

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize(("strategy", "loss"), [("fedel", 0.5), ("depthfl", 1.0)])
def test_evaluation_is_answered_and_repeated(tmp_path: Path, strategy: str, loss: float) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            assert (await fed.joined(run_table(strategy=strategy))).can_evaluate
            for number in (1, 2):
                fed.coordinator.push(evaluate=coordinator_pb2.EvaluationTask(run=RUN, model_version=0))
                done = await fed.coordinator.until("evaluation", number)
                expected = trainers.score(initial_model(), "final").accuracy
                assert (expected, loss, 100) == (done.accuracy, done.loss, done.num_samples)
        assert 1 == len(fed.aggregator.requests)

    run_scenario(tmp_path, scenario)


def test_ended_run_leaves_no_files(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            await fed.done(0)
            assert [] != list(tmp_path.glob("*/model-*"))
            ended = coordinator_pb2.RunEnded(run=RUN, phase=coordinator_pb2.RUN_PHASE_FINISHED)
            fed.coordinator.push(ended=ended)
            fed.offer(run_table("broken"))
            await fed.coordinator.until("failed")
        assert [] == list(tmp_path.glob("*/*"))

    run_scenario(tmp_path, scenario)


def test_slowdown_scales_the_profile(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent(slowdown=3.0)):
            join = await fed.joined()
        expected = CLIENT.profile.tensors[0].update_seconds * 3
        assert expected == pytest.approx(join.profile.tensors[0].update_seconds)

    run_scenario(tmp_path, scenario)


def test_stop_finishes_the_upload(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        fed.aggregator.permits.clear()
        agent = fed.agent()
        async with running(agent) as ended:
            await fed.joined()
            fed.order(0)
            await fed.aggregator.waiting.wait()
            agent.stop()
            fed.aggregator.permits.set()
            await ended
        await fed.done(0)
        assert fed.coordinator.half_closed
        assert 1 == fed.coordinator.sessions

    run_scenario(tmp_path, scenario)


def test_stop_does_not_wait_for_training(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        agent = fed.agent()
        async with running(agent) as ended:
            await fed.joined(run_table("held"))
            fed.order(0)
            await asyncio.to_thread(trainers.entered.wait, 10)
            agent.stop()
            await ended
            assert agent.worker.busy
        assert fed.coordinator.half_closed
        assert [] == fed.aggregator.updates()
        trainers.release.set()

    run_scenario(tmp_path, scenario)
