"""Simulation and gRPC, bit for bit, where a client is late, fails, is lost, or was invited in excess."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from fedel_aggregator.servicer import Aggregator

from fedel.audit.audit import Sources, audit
from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.types import UploadSettings
from tests.federation.processes import RUN, gate_of
from tests.federation.support import agents, create_run, job_of, model_of, servers, simulated, until, watching
from tests.simulation.history import History, Script
from tests.strategies.fakes import same_bits

NUM_CLIENTS = 4
DEADLINE_SECONDS = 3.0
"""On both clocks; a client that is not slowed down takes less on the virtual one."""


def job_in(gate: Path, name: str = "fedel", seed: int = 5, **rounds: object) -> RunConfig:
    soon = {"deadline_factor": 1e-3, "deadline_floor_seconds": DEADLINE_SECONDS}
    return job_of(
        {"name": name},
        NUM_CLIENTS,
        seed=seed,
        trainer="gated",
        work={"num_steps": 1},
        options={"gate": str(gate)},
        **(soon | rounds),
    )


@dataclass(frozen=True)
class Case:
    job: RunConfig
    script: Script

    def run(self) -> History:
        return simulated(self.job, NUM_CLIENTS, self.script)


def late(gate: Path) -> Case:
    """The round closes at its deadline; the update that comes afterwards is refused."""
    return Case(job_in(gate), Script(slow={1: {"client-2": 50.0}}))


def failed(gate: Path) -> Case:
    """A task fails; the round closes without waiting for it."""
    return Case(job_in(gate, deadline_floor_seconds=60.0), Script(broken={1: {"client-1"}}))


def lost(gate: Path) -> Case:
    """An agent ends while it trains and never comes back; the round closes without it."""
    return Case(job_in(gate, deadline_floor_seconds=60.0), Script(away={2: {"client-1"}}))


def over_selected(gate: Path) -> Case:
    """Twice as many are invited as wanted; the round closes with the first two."""
    job = job_in(gate, num_participants=2, over_select=2.0, deadline_floor_seconds=60.0)
    return Case(job, Script())


def late_in_the_next_round(gate: Path) -> Case:
    """A client that is late, and not drawn for the next round, counts there."""
    for seed in range(50):
        job = job_in(gate, seed=seed, num_participants=2, late="next")
        undisturbed = simulated(job, NUM_CLIENTS)
        drawn = [{task.client for task in plan.tasks} for plan in undisturbed.plans]
        for client in drawn[1] - drawn[2]:
            entry = undisturbed.records[1].client(client)
            assert entry is not None
            slowness = 1.05 * DEADLINE_SECONDS / entry.train_seconds
            return Case(job, Script(slow={1: {client: slowness}}))
    raise AssertionError("no seed draws a client in round 1 and not in round 2")


def two_rounds_late(gate: Path) -> Case:
    """A client that is two rounds late gets no task in between; a part of its change counts."""
    job = job_in(gate, num_rounds=4, late="weigh", max_staleness=3)
    entry = simulated(job, NUM_CLIENTS).records[0].client("client-2")
    without = simulated(job, NUM_CLIENTS, Script(slow={0: {"client-2": 1e9}})).records
    assert entry is not None
    seconds = [record.latency_seconds for record in without]
    slowness = (seconds[0] + seconds[1] + seconds[2] / 2) / entry.train_seconds
    return Case(job, Script(slow={0: {"client-2": slowness}}))


def two_rounds_late_and_compressed(gate: Path) -> Case:
    """The same with changes of one byte."""
    case = two_rounds_late(gate)
    return replace(case, job=replace(case.job, upload=UploadSettings("int8")))


def late_and_compressed(gate: Path) -> Case:
    """The same: what is late is restored from the version that its client started from."""
    case = late_in_the_next_round(gate)
    return replace(case, job=replace(case.job, upload=UploadSettings("int8")))


def lost_and_compressed(gate: Path) -> Case:
    """A round that a client is lost in leaves its residuals as they were."""
    job = replace(job_in(gate, num_rounds=4), upload=UploadSettings("topk"))
    return Case(job, Script(slow={1: {"client-2": 50.0}}))


def accepted_are(aggregator: Aggregator, wanted: int) -> bool:
    return wanted == aggregator.registry.get_sample_value("fedel_uploads_total", {"outcome": "accepted"})


def lateness(records: Iterable[RoundRecord]) -> list[list[int]]:
    return [[entry.staleness for entry in record.clients] for record in records]


async def grpc_run(case: Case, folder: Path) -> tuple[list[list[str]], list[list[int]], bool]:
    """Who counts in each round, how late each is, and whether the model has the simulation's bits."""
    expected, gate = case.run(), gate_of(case.job)
    for round_num, clients in case.script.broken.items():
        for client in clients:
            gate.fail(client, round_num)
    held: list[set[str]] = []
    released: dict[int, list[tuple[str, int]]] = {}
    """By round: clients, and the round that they are held in; late ones, when the round that they are for is
    about to begin."""
    comes_in = {
        (entry.client, record.round - entry.staleness): record.round
        for record in expected.records
        for entry in record.clients
    }
    for round_num, (plan, counted) in enumerate(zip(expected.plans, expected.counted, strict=True)):
        waits_for_late = expected.records[round_num].num_late > 0
        missing = {task.client for task in plan.tasks} - (set() if waits_for_late else counted.keys())
        held.append(missing - set(case.script.broken.get(round_num, ())))
        for client in held[-1]:
            gate.hold(client, round_num)
            after = comes_in.get((client, round_num), round_num + 1) - 1
            released.setdefault(max(round_num, after), []).append((client, round_num))
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(servers(folder))
        await create_run(made.address, RUN, case.job)
        watch = await stack.enter_async_context(watching(made.address, RUN))
        clients = range(NUM_CLIENTS)
        started = await stack.enter_async_context(agents(folder, made.address, clients, NUM_CLIENTS))
        num_accepted = 0
        for round_num, record in enumerate(expected.records):
            for client in case.script.away.get(round_num, ()):
                await until(lambda of=(client, round_num): gate.times_trained(*of) > 0, f"{client} to train")
                started[int(client.rpartition("-")[2])].stop()
            num_accepted += record.num_updates
            if record.num_late:
                wanted = num_accepted - record.num_updates + record.num_late
                await until(partial(accepted_are, made.aggregators[0], wanted), "the late update")
                for client, held_in in released.get(round_num, ()):
                    gate.release(client, held_in)
            await until(lambda wanted=round_num: len(watch.records) > wanted, f"round {round_num}")
            if not record.num_late:
                for client, held_in in released.get(round_num, ()):
                    gate.release(client, held_in)
        await watch.finished()
        same = same_bits(expected.model, await model_of(made.address, RUN, folder))
        return watch.counted, lateness(watch.records), same


@pytest.mark.parametrize(
    "make",
    [
        late,
        failed,
        lost,
        over_selected,
        late_in_the_next_round,
        late_and_compressed,
        lost_and_compressed,
        two_rounds_late,
        two_rounds_late_and_compressed,
    ],
    ids=lambda f: f.__name__,
)
def test_grpc_gives_the_bits_of_the_simulation(tmp_path: Path, make) -> None:
    case = make(tmp_path / "gate")
    expected = case.run()
    counted = [sorted(updates) for updates in expected.counted]
    assert (counted, lateness(expected.records), True) == asyncio.run(grpc_run(case, tmp_path))
    database = f"sqlite:///{tmp_path / 'coordinator.db'}"
    found = audit(Sources(RUN, (tmp_path / "aggregator-0",), database))
    assert ((), len(counted)) == (found.findings, found.num_recomputed)


def test_the_cases_are_what_they_are_called(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    everyone = [f"client-{index}" for index in range(NUM_CLIENTS)]
    run = late(gate).run()
    assert (("client-2",), 3) == (run.records[1].late, run.records[1].num_updates)
    run = failed(gate).run()
    assert {"client-1": "its task failed"} == run.records[1].refused
    assert sorted(set(everyone) - {"client-1"}) == sorted(run.counted[1])
    run = lost(gate).run()
    assert (("client-1",), 3) == (run.records[2].dropped, run.records[2].num_updates)
    run = over_selected(gate).run()
    assert [(4, 2)] * 3 == [(record.num_tasks, record.num_updates) for record in run.records]
    run = late_in_the_next_round(gate).run()
    assert [0, 0, 1] == [record.num_late for record in run.records]
    for make in (two_rounds_late, two_rounds_late_and_compressed):
        run = make(gate).run()
        assert [[0, 0, 0], [0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0]] == lateness(run.records)
        assert [4, 3, 3, 4] == [record.num_tasks for record in run.records]
    run = late_and_compressed(gate).run()
    assert [0, 0, 1] == [record.num_late for record in run.records]
    run = lost_and_compressed(gate).run()
    assert (("client-2",), 3) == (run.records[1].late, run.records[1].num_updates)
