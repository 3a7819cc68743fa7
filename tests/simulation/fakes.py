"""Simulations without torch: the uneven fleet of the strategies' tests behind the simulation's ports."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedel.errors import DataError
from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.roles.coordinator import RoundEngine
from fedel.roles.planner import RoundPlanner
from fedel.simulation.conditions import Faults, Link
from fedel.simulation.devices import Client
from fedel.simulation.executors import Executor, Serial
from fedel.simulation.job import Evaluation
from fedel.simulation.run import Simulation
from fedel.simulation.store import Checkpoint, RunFolder
from fedel.simulation.workers import EvaluationPart, OwnTest, Tally, Worker
from fedel.strategies.base import PAPER_CLOCK
from fedel.types import ModelSpec, Tensors, Trainer
from tests.federation.trainers import OwnTest as FakeOwnTest
from tests.strategies import fakes

WORK = {"num_steps": 4, "batch_size": 8, "lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3}


@dataclass
class FakeWorkload:
    """Trainers in numpy; a "test" counts only the model's values."""

    trainers: Mapping[str, Trainer]
    num_test_samples: int = 40
    fails: Mapping[str, str] = field(default_factory=dict)
    """Client -> ``error``, ``user error`` or ``dies``."""

    @property
    def spec(self) -> ModelSpec:
        return next(iter(self.trainers.values())).spec

    def prepare(self) -> None:
        pass

    def trainer(self, client: str) -> Trainer:
        match self.fails.get(client):
            case "error":
                raise ZeroDivisionError("planted")
            case "user error":
                raise DataError("planted: no samples")
            case "dies":
                os._exit(3)
        return self.trainers[client]

    def test_own(self, model: Tensors, test: OwnTest) -> tuple[float, float]:
        score = FakeOwnTest(test.client)(model, test.average)
        return score.accuracy, score.loss

    def test(self, model: Tensors, part: EvaluationPart) -> Sequence[Tally]:
        size = (part.limit or self.num_test_samples) / part.num_parts
        loss = float(sum(abs(values).sum() for values in model.values())) * (part.part + 1) / 7
        one = Tally(int(loss) % (int(size) + 1), loss, int(size))
        return [one] * (self.spec.num_blocks if part.each_exit else 1)


def run_config(strategy: str | Mapping[str, Any] = "fedel", seed: int = 1, **rounds: Any) -> RunConfig:
    table = {"name": strategy} if isinstance(strategy, str) else strategy
    rounds = {"num_rounds": 5, "deadline_floor_seconds": 0.0, **rounds}
    return RunConfig.parse({"seed": seed, "strategy": table, "work": WORK, "rounds": rounds})


@dataclass
class Played:
    records: list[RoundRecord]
    checkpoint: Checkpoint

    @property
    def model(self) -> Tensors:
        return self.checkpoint.model

    def comparable(self) -> list[RoundRecord]:
        """The records without what the wall clock says."""
        return [replace(record, wall_seconds=None) for record in self.records]


def clients_of(trainers: Mapping[str, Any], link: Link | None = None) -> list[Client]:
    return [
        Client(name, t.num_samples, t.profile, t.profile.device, link or Link()) for name, t in trainers.items()
    ]


def play(
    run: RunConfig,
    trainers: Mapping[str, Any] | None = None,
    make: Callable[[Worker], Executor] = Serial,
    *,
    scope: str = "",
    link: Link | None = None,
    faults: Faults | None = None,
    evaluation: Evaluation | None = None,
    folder: Path | None = None,
    stop_after: int | None = None,
    fails: Mapping[str, str] | None = None,
) -> Played:
    """A run on the fake fleet; with ``folder`` it is kept there, and continued if it is there already."""
    trainers = trainers or fakes.fleet(4)
    workload = FakeWorkload(trainers, fails=fails or {})
    engine = RoundEngine(RoundPlanner(run, workload.spec, scope or PAPER_CLOCK), tests_itself=True)
    store = RunFolder(folder) if folder else None
    kept = store.open(run.table()) if store else None
    executor = make(Worker(engine.planner.strategy, workload))
    simulation = Simulation(
        engine,
        clients_of(trainers, link),
        executor,
        kept or Checkpoint(fakes.initial_model(workload.spec)),
        faults=faults,
        evaluation=evaluation,
        num_test_samples=workload.num_test_samples,
    )
    records = []
    try:
        while not simulation.is_over and simulation.checkpoint.handover.round_num != stop_after:
            records.append(simulation.play())
            if store:
                store.commit(simulation.checkpoint, records[-1])
    finally:
        executor.close()
    return Played(store.records() if store else records, simulation.checkpoint)


def slowed(slownesses: Sequence[float], num_samples: int = 40, of: ModelSpec | None = None) -> dict[str, Any]:
    """Clients that differ only in speed and data."""
    return {
        f"client-{i}": replace(trainer, num_samples=num_samples, profile=fakes.profile(slowness, of))
        for (i, slowness), trainer in zip(
            enumerate(slownesses), fakes.fleet(len(slownesses), of).values(), strict=True
        )
    }
