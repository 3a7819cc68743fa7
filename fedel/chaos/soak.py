"""The soak: one long run with a fault now and then; memory and descriptors of the servers are measured."""

from __future__ import annotations

import asyncio
import csv
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedel import testing
from fedel.chaos import trainer, verdict
from fedel.chaos.drill import Stage, job_of
from fedel.chaos.faults import draw_fault
from fedel.chaos.federation import RUN, Federation, Layout, Watch, federation
from fedel.chaos.postgres import Postgres
from fedel.chaos.verdict import Outcome
from fedel.desk.submit import control, create
from fedel.errors import FedelError, ServiceError
from fedel.job import RunConfig
from fedel.seeds import generator
from fedel.v1 import coordinator_pb2 as pb

SAMPLE_SECONDS = 5.0
KILLING_SHARE = 1 / 3
"""Servers are killed only in this first part of the time: the rest shows one life of each of them."""
WARM_UP_SHARE = 1 / 4
"""This part of a life is left out: caches fill."""
LEVEL_MEGABYTES, LEVEL_SHARE, LEVEL_DESCRIPTORS = 8.0, 0.05, 8.0
"""Growth over the measured time that still counts as level: this much, or this share of what there is."""
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Soak:
    seed: int
    minutes: float
    num_agents: int
    num_aggregators: int
    database: str
    fault_every: float

    @property
    def layout(self) -> Layout:
        # A round of 50 agents adds 0.1 MB to the database: 360 MB in an hour if each takes a second.
        return Layout(self.num_agents, self.num_aggregators, self.database, keep_updates=30, disk_megabytes=512)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.minutes:g} minutes, {self.num_agents} agents, aggregators: "
            f"{self.num_aggregators}, {self.database}, a fault every {self.fault_every:g} s"
        )


@dataclass(frozen=True)
class Sample:
    seconds: float
    server: str
    pid: int
    megabytes: float
    num_descriptors: int


async def run_soak(
    soak: Soak, folder: Path, say: Callable[[str], None], database: Postgres | None = None
) -> Outcome:
    outcome = Outcome(soak.seed, str(soak))
    stage = Stage(outcome)
    job = job_of(soak.seed, soak.num_agents, 1_000_000, {"name": "fedel"}, scale=1)
    samples: list[Sample] = []
    say(str(soak))
    try:
        async with federation(folder, soak.layout, database) as made:
            await _play(made, soak, job, stage, samples, say)
            stage.stuck(await made.stop())
            await asyncio.to_thread(verdict.judge, made, outcome, replay=False)
    except FedelError as error:
        outcome.problems.append(str(error))
    _write(samples, folder / "samples.csv")
    for server in soak.layout.servers:
        line, level = describe(server, samples)
        say(line)
        if not level:
            outcome.problems.append(f"not level: {line}")
    outcome.seconds = stage.seconds
    return outcome


async def _play(
    made: Federation,
    soak: Soak,
    job: RunConfig,
    stage: Stage,
    samples: list[Sample],
    say: Callable[[str], None],
) -> None:
    spec = trainer.spec_of(trainer.scale_of(job))
    await create(made.address, RUN, job, spec, testing.initial_model(spec))
    watch, rng = Watch(made.address), generator(soak.seed, "soak")
    tasks = [
        asyncio.ensure_future(stage.look_after(made)),
        asyncio.ensure_future(_sample(made, stage, samples)),
    ]
    faults: set[asyncio.Task[None]] = set()
    end = time.monotonic() + soak.minutes * 60
    try:
        while (left := end - time.monotonic()) > 0 and not watch.over:
            await asyncio.sleep(min(soak.fault_every, left))
            servers_live = left < soak.minutes * 60 * (1 - KILLING_SHARE)
            fault = draw_fault(rng, soak.layout, watch.status.round_num, servers_live)
            say(f"{stage.seconds:7.1f} s  round {watch.status.round_num}: {fault}")
            faults.add(asyncio.create_task(stage.disturb(made, fault, watch.status.round_num)))
        await asyncio.wait_for(asyncio.gather(*faults), STOP_SECONDS)
        if not watch.over:
            await control(made.address, RUN, pb.RUN_ACTION_STOP)
        status = await asyncio.wait_for(watch.ended(), STOP_SECONDS)
    except asyncio.TimeoutError:
        raise ServiceError(f"the run did not stop within {STOP_SECONDS:g} s: {watch.status.message}") from None
    finally:
        for task in (*tasks, *faults):
            task.cancel()
        await watch.close()
    if status.phase != pb.RUN_PHASE_STOPPED:
        raise ServiceError(f"the run ended before its time: {status.message}")


async def _sample(made: Federation, stage: Stage, samples: list[Sample]) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    while True:
        for server in made.layout.servers:
            pid = made.processes[server].pid
            try:
                resident = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * page
                descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            except OSError:
                continue  # it is being started again
            samples.append(Sample(stage.seconds, server, pid, resident / 1e6, descriptors))
        await asyncio.sleep(SAMPLE_SECONDS)


def describe(server: str, samples: list[Sample]) -> tuple[str, bool]:
    """The last life of a server in one line, and whether it is level."""
    own = [sample for sample in samples if sample.server == server]
    life = [sample for sample in own if sample.pid == own[-1].pid] if own else []
    measured = life[int(len(life) * WARM_UP_SHARE) :]
    if len(measured) < 10:
        return f"{server}: too few samples to say whether it is level", True
    hours = (measured[-1].seconds - measured[0].seconds) / 3600
    megabytes = np.array([sample.megabytes for sample in measured])
    descriptors = np.array([float(sample.num_descriptors) for sample in measured])
    memory_slope, descriptor_slope = _slope(measured, megabytes), _slope(measured, descriptors)
    room = max(LEVEL_MEGABYTES, LEVEL_SHARE * float(np.median(megabytes)))
    level = memory_slope * hours < room and descriptor_slope * hours < LEVEL_DESCRIPTORS
    word = "level" if level else "GROWS"
    return (
        f"{server}: {word} over {60 * hours:.0f} minutes: memory {_spread(megabytes)} MB, "
        f"{memory_slope:+.1f} MB per hour; descriptors {_spread(descriptors)}, {descriptor_slope:+.1f} per hour"
    ), level


def _slope(samples: list[Sample], values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Per hour, by least squares."""
    hours = np.array([sample.seconds for sample in samples]) / 3600
    return float(np.polyfit(hours, values, 1)[0])


def _spread(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> str:
    return f"{values.min():.0f} to {values.max():.0f}, median {np.median(values):.0f}"


def _write(samples: list[Sample], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Sample.__annotations__)
        writer.writerows(tuple(vars(sample).values()) for sample in samples)
