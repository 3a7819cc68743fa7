"""A limit of active runs: who waits, behind whom, and who starts when a run ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from fedel.v1 import coordinator_pb2 as pb
from tests.services.coordinator.support import Federation, asynchronous, run_config

CONFIG = run_config(num_rounds=1, min_clients=1, evaluate_every=0)
QUEUED, WAITING = pb.RUN_PHASE_QUEUED, pb.RUN_PHASE_WAITING


async def phases(federation: Federation) -> dict[str, int]:
    return {s.run: s.phase for s in (await federation.stub.ListRuns(pb.ListRunsRequest())).runs}


@asynchronous
async def test_a_second_run_waits_for_the_first_and_starts_when_it_ends(tmp_path: Path) -> None:
    async with Federation(tmp_path, max_active_runs=1) as federation:
        assert WAITING == (await federation.create(CONFIG, "one")).phase
        status = await federation.create(CONFIG, "two")
        assert (QUEUED, "waits in the queue behind one (waiting) (max_active_runs = 1)") == (
            status.phase,
            status.message,
        )
        agent = federation.agent("client-0")
        first, second = await asyncio.gather(federation.finished("one"), federation.finished("two"))
        assert (1, 1) == (len(first), len(second))
        assert second[0].opened_at >= first[0].opened_at + first[0].latency_seconds
        assert ["one", "two"] == [message.run for message in agent.kinds("run")], "offered when its turn comes"


@asynchronous
async def test_the_highest_priority_is_next_also_after_a_restart(tmp_path: Path) -> None:
    async with Federation(tmp_path, max_active_runs=1) as federation:
        await federation.create(CONFIG, "one")
        await federation.create(CONFIG, "two")
        await federation.create(replace(CONFIG, priority=5), "urgent")
        await federation.restart_coordinator()
        assert {"one": WAITING, "two": QUEUED, "urgent": QUEUED} == await phases(federation)
        status = await federation.status(lambda s: True, "two")
        assert "behind one (waiting), urgent (queued, priority 5)" in status.message
        await federation.control(pb.RUN_ACTION_STOP, "one")
        await federation.status(lambda s: s.phase == WAITING, "urgent")
        assert QUEUED == (await phases(federation))["two"]


@asynchronous
async def test_a_paused_run_makes_room_and_a_lifted_limit_starts_all(tmp_path: Path) -> None:
    async with Federation(tmp_path, max_active_runs=1) as federation:
        for name in ("one", "two", "three"):
            await federation.create(CONFIG, name)
        await federation.control(pb.RUN_ACTION_PAUSE, "one")
        await federation.status(lambda s: s.phase == WAITING, "two")
        assert WAITING == (await federation.control(pb.RUN_ACTION_RESUME, "one")).phase, (
            "who resumes it decides"
        )
        assert QUEUED == (await phases(federation))["three"]
        federation.settings |= {"max_active_runs": 0}
        await federation.restart_coordinator()
        await federation.status(lambda s: s.phase == WAITING, "three")


@asynchronous
async def test_a_queued_run_can_be_stopped_by_name(tmp_path: Path) -> None:
    async with Federation(tmp_path, max_active_runs=1) as federation:
        await federation.create(CONFIG, "one")
        await federation.create(CONFIG, "two")
        await federation.control(pb.RUN_ACTION_STOP, "two")
        assert [] == await federation.finished("two")
        found = (await federation.stub.ListRuns(pb.ListRunsRequest())).runs[0]
        assert (pb.RUN_PHASE_STOPPED, "stopped before its first round") == (found.phase, found.message)
