"""The ``[limits]`` of an agent: what a server may ask of a device, in time, runs and disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import fedel_edge.agent
import pytest
from fedel_edge.gate import Limits

from fedel.errors import ServiceError
from fedel.v1 import coordinator_pb2, task_pb2
from tests.agents import trainers
from tests.agents.stand_ins import RUN, SPEC, Federation, run_scenario, run_table, running, task_of


def short_task(round_num: int) -> task_pb2.Task:
    task = task_of(round_num)
    task.work.num_steps = 1
    return task


LIMIT = Limits(max_task_seconds=1.0)


def test_a_task_ends_at_the_owners_limit(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent(limits=LIMIT)):
            await fed.joined(run_table("held"))
            fed.coordinator.push(task=short_task(0))
            failed = await fed.coordinator.until("failed")
            assert (0, True) == (failed.round_num, "limits.max_task_seconds = 1" in failed.message)
            trainers.release.set()
            fed.coordinator.push(task=short_task(1))
            await fed.done(1)
        assert [] == [path.name for path in tmp_path.glob("*/update-0")]

    run_scenario(tmp_path, scenario)


def test_an_upload_ends_at_the_owners_limit(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        fed.aggregator.permits.clear()
        async with running(fed.agent(limits=LIMIT)):
            await fed.joined()
            fed.coordinator.push(task=short_task(0))
            assert "limits.max_task_seconds = 1" in (await fed.coordinator.until("failed")).message
            await fed.aggregator.upload_ended.wait()

    run_scenario(tmp_path, scenario)


def test_training_that_cannot_be_ended_ends_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedel_edge.agent, "STUCK_SECONDS", 0.2)

    async def scenario(fed: Federation) -> None:
        agent = fed.agent(limits=LIMIT)
        ended = asyncio.ensure_future(agent.run())
        await fed.joined(run_table("held"))
        fed.coordinator.push(task=short_task(0))
        with pytest.raises(ServiceError, match="cannot be interrupted: the agent ends"):
            await asyncio.wait_for(ended, 20)
        assert agent.worker.busy

    run_scenario(tmp_path, scenario)


def test_only_so_many_runs(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent(limits=Limits(max_runs=1))):
            await fed.joined()
            offer = coordinator_pb2.RunOffer(
                run="second",
                config_json=run_table(),
                model_digest=SPEC.digest,
                shards=[coordinator_pb2.Shard(address=fed.addresses[0])],
            )
            fed.coordinator.push(run=offer)
            assert "limits.max_runs = 1" in (await fed.coordinator.until("failed")).message
            fed.coordinator.push(ended=coordinator_pb2.RunEnded(run=RUN))
            fed.coordinator.push(run=offer)
            await fed.coordinator.until("join", 2)

    run_scenario(tmp_path, scenario)


def test_a_model_that_is_too_large_for_the_disk(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent(limits=Limits(max_disk_bytes=1000))):
            await fed.coordinator.until("hello")
            fed.offer()
            assert "limits.max_disk_bytes = 1000" in (await fed.coordinator.until("failed")).message

    run_scenario(tmp_path, scenario)


def test_preparing_a_run_ends_at_the_owners_limit_and_others_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for it begins when the worker does: it does not count what it waits for."""
    monkeypatch.setattr(fedel_edge.agent, "STUCK_SECONDS", 20.0)

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent(limits=Limits(max_prepare_seconds=0.3))):
            await fed.coordinator.until("hello")
            fed.offer(run_table("noted"))
            failed = await fed.coordinator.until("failed")
            assert RUN == failed.run
            assert "limits.max_prepare_seconds = 0.3" in failed.message
            assert "raise the limit there, or give the device a profile" in failed.message
            fed.offer(instance="2")
            trainers.release.set()
            await fed.coordinator.until("join")

    run_scenario(tmp_path, scenario)


def test_preparing_that_cannot_be_ended_ends_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedel_edge.agent, "STUCK_SECONDS", 0.2)

    async def scenario(fed: Federation) -> None:
        ended = asyncio.ensure_future(fed.agent(limits=Limits(max_prepare_seconds=0.2)).run())
        await fed.coordinator.until("hello")
        fed.offer(run_table("noted"))
        with pytest.raises(ServiceError, match=r"what was given up still runs .* the agent ends"):
            await asyncio.wait_for(ended, 20)

    run_scenario(tmp_path, scenario)
