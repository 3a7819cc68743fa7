"""What an agent does at the same time, and what it must not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import grpc
import numpy as np
import pytest
from fedel_edge.run_folder import Outbox

from fedel.v1 import coordinator_pb2
from tests.agents import trainers
from tests.agents.stand_ins import (
    PATIENCE_SECONDS,
    RUN,
    SPEC,
    Aggregator,
    Federation,
    held_of,
    run_scenario,
    run_table,
    running,
)


def two_shards() -> list[Aggregator]:
    deep = frozenset(t.name for t in SPEC.tensors if t.block > SPEC.num_blocks // 2)
    return [Aggregator(deep), Aggregator(frozenset(t.name for t in SPEC.tensors) - deep)]


def test_upload_follows_a_moved_aggregator(tmp_path: Path) -> None:
    """The offer with the new address must not wait behind the upload that needs it."""

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(run_table("held"))
            fed.order(0)
            await asyncio.to_thread(trainers.entered.wait, 10)
            await fed.move_aggregators()
            trainers.release.set()
            await fed.coordinator.until("progress", where=lambda p: p.phase == "upload")
            await fed.restart_coordinator()
            await fed.joined(run_table("held"))
            await fed.done(0)
            fed.order(1, accepted_round=0)
            await fed.done(1)
        assert [0, 1] == [u.report.round_num for u in fed.aggregator.updates()]

    run_scenario(tmp_path, scenario)


def test_rejoins_while_training(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(run_table("held"))
            fed.order(0)
            await asyncio.to_thread(trainers.entered.wait, 10)
            await fed.restart_coordinator()
            await fed.joined(run_table("held"))
            fed.order(0)
            assert (await fed.coordinator.until("answer")).accepted
            trainers.release.set()
            await fed.done(0)
        assert 1 == len(fed.aggregator.updates())

    run_scenario(tmp_path, scenario)


def test_a_download_that_broke_off_leaves_the_copy_as_it_was(tmp_path: Path) -> None:
    """One shard has answered, the other has not: what came is not taken for a part of either version."""
    shards = two_shards()

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            await fed.done(0)
            for shard in shards:
                shard.versions[1] = {name: values + np.float32(1) for name, values in shard.versions[0].items()}
                shard.asked.clear()
            shards[1].downloads.clear()
            fed.order(1, model_version=1)
            await asyncio.wait_for(asyncio.gather(*(s.asked.wait() for s in shards)), PATIENCE_SECONDS)
        shards[1].downloads.set()
        async with running(fed.agent()):
            await fed.joined(number=2)
            fed.order(1, model_version=1)
            await fed.done(1)
        for shard in shards:
            assert [-1, 0, 0] == [only(held_of(request).values()) for request in shard.requests]

    def only(values: Iterable[int]) -> int:
        (value,) = set(values)
        return value

    run_scenario(tmp_path, scenario, aggregators=shards)


def test_shards_are_used_at_the_same_time(tmp_path: Path) -> None:
    """Each answers only once the other was called too, for the download and for the upload."""
    shards = two_shards()
    downloads, uploads = asyncio.Event(), asyncio.Event()

    async def scenario(fed: Federation) -> None:
        for shard in shards:
            shard.downloads = downloads
            shard.permits = uploads
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            await asyncio.wait_for(asyncio.gather(*(s.asked.wait() for s in shards)), PATIENCE_SECONDS)
            downloads.set()
            await asyncio.wait_for(asyncio.gather(*(s.waiting.wait() for s in shards)), PATIENCE_SECONDS)
            uploads.set()
            done = await fed.done(0)
        assert done.phases.wait >= 0
        assert done.phases.upload >= 0
        assert done.bytes_up == sum(s.bytes_received for s in shards)

    run_scenario(tmp_path, scenario, aggregators=shards)


def test_failed_shard_ends_the_other_uploads(tmp_path: Path) -> None:
    shards = two_shards()

    async def scenario(fed: Federation) -> None:
        shards[0].permits.clear()
        shards[1].refuse_with = (grpc.StatusCode.FAILED_PRECONDITION, "late")
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            assert "late: not like this" == (await fed.coordinator.until("failed")).message
            await asyncio.wait_for(shards[0].upload_ended.wait(), PATIENCE_SECONDS)
            shards[0].permits.set()
            shards[1].refuse_with = None
            fed.order(1)
            await fed.done(1)
        assert [[1], [1]] == [[u.report.round_num for u in s.updates()] for s in shards]

    run_scenario(tmp_path, scenario, aggregators=shards)


def test_event_loop_deletes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[tuple[str, int]] = []
    drop = Outbox.drop

    def noted(outbox: Outbox, up_to: int) -> None:
        dropped.append((threading.current_thread().name, up_to))
        drop(outbox, up_to)

    monkeypatch.setattr(Outbox, "drop", noted)

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            await fed.done(0)
            fed.coordinator.push(closed=coordinator_pb2.RoundClosed(run=RUN, round_num=0, model_version=1))
            fed.order(1)
            await fed.done(1)
            fed.offer(run_table("failing"))
            await fed.coordinator.until("join", 2)
            fed.order(2)
            await fed.coordinator.until("failed")
            fed.order(3)
            await fed.coordinator.until("failed", 2)
        assert [("worker", 0), ("worker", 2)] == dropped[:2]

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize("trainer", ["exiting", "interrupting", "exhausted"])
def test_exiting_trainer_is_a_failed_task(tmp_path: Path, trainer: str) -> None:
    async def scenario(fed: Federation) -> None:
        agent = fed.agent()
        async with running(agent):
            await fed.joined(run_table(trainer))
            for round_num in (0, 1):
                fed.order(round_num)
                failed = await fed.coordinator.until("failed", round_num + 1)
                assert round_num == failed.round_num
                assert trainers.EXITS[trainer].__name__ in failed.message
        assert 2 == agent.counts["failed"]

    run_scenario(tmp_path, scenario)
