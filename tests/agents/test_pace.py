from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import pytest
from fedel_edge.pace import Clocks, PacedTrainer, Until

from fedel.types import Tensors, Trained, TrainSpec, Window
from tests.strategies.fakes import WORK, FakeTrainer, initial_model, profile, spec

SPEC = spec()
STEP = 0.5
JOB = TrainSpec(WORK, 4, 1, frozenset({SPEC.weights[0].name}), (1,))


@dataclass
class World(threading.Event):
    """A clock that work and waits move on; an event that waits on it."""

    now: float = 100.0
    waits: list[float] = field(default_factory=list)
    per_step: float = STEP

    def __post_init__(self) -> None:
        super().__init__()

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self.waits.append(timeout or 0.0)
            self.now += timeout or 0.0
        return self.is_set()

    @property
    def clocks(self) -> Clocks:
        return Clocks(now=lambda: self.now, busy=lambda: self.now)


@dataclass(frozen=True)
class Timed(FakeTrainer):
    """Every step and the probe take their time on the world's clock."""

    world: World = field(default_factory=World)

    def probe(self, model, window, work, seed):  # type: ignore[no-untyped-def]
        self.world.now += self.world.per_step
        return super().probe(model, window, work, seed)

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        return replace(
            super().train(model, replace(train_spec, pace=_Steps(train_spec, self.world))), seconds=1.0
        )


@dataclass(frozen=True)
class _Steps:
    train_spec: TrainSpec
    world: World

    def goes_on(self, num_done: int) -> bool:
        if num_done:
            self.world.now += self.world.per_step
        return self.train_spec.goes_on(num_done)


def paced(world: World, slowdown: float = 1.0, until: Until | None = None) -> PacedTrainer:
    return PacedTrainer(Timed(1, 20, profile(), world=world), world, slowdown, until, world.clocks)


def at(seconds: float, max_steps: int = 100) -> Until:
    return Until(lambda _: 100.0 + seconds, max_steps)


def test_a_slower_device_waits_after_every_step_and_reports_the_longer_time() -> None:
    world = World()
    trainer = paced(world, 3.0)
    trainer.probe(initial_model(), Window(1, 2), WORK, 1)
    trained = trainer.train(initial_model(), JOB)
    assert [2 * STEP] * 5 == world.waits
    assert pytest.approx(3 * 5 * STEP) == trained.seconds == world.now - 100.0
    assert pytest.approx(3 * STEP) == trained.probe_seconds
    assert 4 == trained.num_steps
    assert pytest.approx(3 * 4 * STEP) == trainer.train(initial_model(), JOB).seconds
    assert profile().scaled(3.0) == trainer.profile


def test_no_slowdown_only_counts_the_probe() -> None:
    world = World()
    trainer = paced(world)
    trainer.probe(initial_model(), Window(1, 2), WORK, 1)
    assert pytest.approx(5 * STEP) == trainer.train(initial_model(), JOB).seconds
    assert [] == world.waits
    assert profile() == trainer.profile


def test_stop_ends_the_wait() -> None:
    world = World()
    world.set()
    assert pytest.approx(4 * STEP) == paced(world, 1e6).train(initial_model(), JOB).seconds


@pytest.mark.parametrize(("seconds", "steps"), [(3.0, 6), (3.2, 6), (3.3, 7), (1.0, 2), (0.0, 1), (-5.0, 1)])
def test_the_clock_ends_a_training_to_half_a_step(seconds: float, steps: int) -> None:
    trained = paced(World(), until=at(seconds)).train(initial_model(), JOB)
    assert steps == trained.num_steps


def test_a_training_by_the_clock_has_a_largest_number_of_steps() -> None:
    assert 9 == paced(World(), until=at(1e9, max_steps=9)).train(initial_model(), JOB).num_steps


def test_a_device_that_becomes_slower_while_it_trains_still_ends_in_time() -> None:
    world = World()
    expected = paced(world, until=at(10.0)).train(initial_model(), JOB)
    slower = World(per_step=2 * STEP)
    assert expected.num_steps == 20
    assert 10 == paced(slower, until=at(10.0)).train(initial_model(), JOB).num_steps
    assert pytest.approx(world.now) == slower.now
