"""One drill: a seed decides the federation, the job and the faults; the run is played, then judged."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedel import testing
from fedel.chaos import trainer, verdict
from fedel.chaos.disk import can_mount
from fedel.chaos.faults import FULL_DISK, Fault, draw_fault, strike
from fedel.chaos.federation import RUN, Federation, Layout, Watch, federation
from fedel.chaos.postgres import Postgres
from fedel.chaos.verdict import Outcome
from fedel.desk.submit import create
from fedel.errors import FedelError, ServiceError
from fedel.job import RunConfig
from fedel.seeds import generator
from fedel.v1 import coordinator_pb2 as pb

LIMIT_SECONDS = 120.0
"""A drill that takes longer hangs."""
_STRATEGIES: tuple[dict[str, Any], ...] = (
    {"name": "fedel"},
    {"name": "fedel", "budget_scope": "train"},
    {"name": "fednova", "base": {"name": "fedel"}},
    {"name": "fedavg"},
    {"name": "heterofl"},
)
_RESTART_SECONDS = 0.5


@dataclass(frozen=True)
class Drill:
    """Everything that the seed decides."""

    seed: int
    layout: Layout
    job: RunConfig
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        layout, rounds = self.layout, self.job.rounds
        return (
            f"seed {self.seed}: {layout.num_agents} agents, aggregators: {layout.num_aggregators}, "
            f"{layout.database}, {self.job.strategy['name']}, {rounds.num_rounds} rounds, late: {rounds.late}"
        )


def job_of(
    rng_seed: int, num_agents: int, num_rounds: int, strategy: dict[str, Any], scale: int, late: str = "refuse"
) -> RunConfig:
    return RunConfig.parse(
        {
            "seed": rng_seed,
            "strategy": strategy,
            "workload": {
                "model": "fake",
                "data": "fake",
                "model_options": {"scale": scale, "train_seconds": 0.15},
            },
            "rounds": {
                "num_rounds": num_rounds,
                "min_clients": num_agents,
                "evaluate_every": 2,
                "deadline_factor": 1e-9,
                "deadline_floor_seconds": 6.0,
                "max_repeats": 1000,  # a busy machine may need many deadlines to start a server again
                "late": late,
            },
            "budget": {"pace": "plan"},  # the same accepted set gives the same bits
            "work": vars(testing.WORK),
            "trainer": trainer.NAME,
        }
    )


def draw(seed: int, num_agents: int = 3, num_aggregators: int = 0, database: str = "sqlite") -> Drill:
    """``num_aggregators`` 0 lets the seed decide: 1 or 2."""
    rng = generator(seed, "drill")
    drawn = int(rng.integers(1, 3))
    layout = Layout(num_agents, num_aggregators or drawn, database)
    strategy = _STRATEGIES[int(rng.integers(len(_STRATEGIES)))]
    late = "next" if rng.random() < 0.25 else "refuse"
    num_rounds = int(rng.integers(4, 7))
    job = job_of(seed, num_agents, num_rounds, strategy, scale=8, late=late)
    rounds = sorted(int(number) for number in rng.integers(0, num_rounds, size=int(rng.integers(3, 7))))
    faults = tuple(draw_fault(rng, layout, number) for number in rounds)
    return Drill(seed, layout, job, faults)


async def run_drill(drill: Drill, folder: Path, database: Postgres | None = None) -> Outcome:
    """Play and judge it. Everything in it has a time limit."""
    outcome = Outcome(drill.seed, str(drill))
    stage = Stage(outcome)
    try:
        async with federation(folder, drill.layout, database) as made:
            await _play(made, drill, stage)
            stage.stuck(await made.stop())
            await asyncio.to_thread(verdict.judge, made, outcome)
    except FedelError as error:
        outcome.problems.append(str(error))
    outcome.seconds = stage.seconds
    return outcome


class Stage:
    """The clock of a drill and what is written down in it."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome, self._begin = outcome, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def note(self, text: str) -> None:
        self._outcome.timeline.append(f"{self.seconds:6.2f} s  {text}")

    def stuck(self, names: list[str]) -> None:
        self._outcome.problems += [f"{name} did not end when it was asked to" for name in names]

    async def disturb(self, made: Federation, fault: Fault, round_num: int) -> None:
        self._outcome.num_faults += 1
        self.note(f"round {round_num}: {fault}")
        if undone := await strike(made, fault):
            self._outcome.not_covered.append(f"{fault.kind}: {undone}")

    async def look_after(self, made: Federation) -> None:
        """Start processes that end by themselves again, as a service manager does."""
        while True:
            await asyncio.sleep(_RESTART_SECONDS)
            for process in made.processes.values():
                if process.ended_by_itself and not process.lock.locked():
                    code = process.returncode
                    self.note(f"{process.name} ended with exit code {code}; starting it again")
                    if code != ServiceError.exit_code:
                        what = f"{process.name} ended with exit code {code}: {process.tail(3)}"
                        self._outcome.problems.append(what)
                    process.start()


async def _play(made: Federation, drill: Drill, stage: Stage) -> None:
    spec = trainer.spec_of(trainer.scale_of(drill.job))
    await create(made.address, RUN, drill.job, spec, testing.initial_model(spec))
    watch = Watch(made.address)
    care = asyncio.ensure_future(stage.look_after(made))

    async def disturb(fault: Fault) -> None:
        if await watch.reach(fault.round_num):
            await asyncio.sleep(fault.after_seconds)
            await stage.disturb(made, fault, watch.status.round_num)

    async def to_the_end() -> pb.RunStatus:
        await asyncio.gather(*map(disturb, drill.faults))
        return await watch.ended()

    try:
        status = await asyncio.wait_for(to_the_end(), LIMIT_SECONDS)
    except asyncio.TimeoutError:
        status = watch.status
        said = f"{pb.RunPhase.Name(status.phase)}, round {status.round_num}: {status.message}"
        raise ServiceError(f"the run did not end within {LIMIT_SECONDS:g} s ({said})") from None
    finally:
        care.cancel()
        await watch.close()
    stage.note(
        f"run {pb.RunPhase.Name(status.phase).removeprefix('RUN_PHASE_').lower()} {status.message}".strip()
    )
    if status.phase != pb.RUN_PHASE_FINISHED:
        raise ServiceError(f"the run did not finish: {status.message}")


def not_covered(layout: Layout) -> list[str]:
    """Faults that this machine does not allow."""
    missing = []
    if layout.small_disks and not can_mount():
        missing.append(f"{FULL_DISK}: only root can mount a small disk")
    if layout.database != "postgresql":
        missing.append("restart of the database: SQLite has no server (--database postgresql)")
    return missing
