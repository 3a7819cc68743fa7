from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import pytest
from fedel_edge.pace import Clocks, PacedTrainer, Until
from fedel_edge.progress import WatchedTrainer

from fedel.core.steps import part_of_batch
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


@dataclass
class _Steps:
    train_spec: TrainSpec
    world: World
    share: float = 1.0

    def next_share(self, num_done: int) -> float:
        if num_done:
            self.world.now += self.share * self.world.per_step
        self.share = self.train_spec.next_share(num_done)
        return self.share


def paced(world: World, slowdown: float = 1.0, until: Until | None = None) -> PacedTrainer:
    return PacedTrainer(Timed(1, 20, profile(), world=world), world, slowdown, until, world.clocks)


def at(seconds: float, max_steps: int = 100) -> Until:
    return Until(lambda _: 100.0 + seconds, max_steps, lambda left: part_of_batch(left, WORK.batch_size))


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


@pytest.mark.parametrize(
    ("seconds", "steps", "last_share"),
    [(3.0, 6, 1.0), (3.05, 6, 1.0), (3.25, 7, 0.5), (3.45, 7, 0.875), (0.3, 1, 1.0), (-5.0, 1, 1.0)],
)
def test_the_clock_ends_a_training_with_a_part_of_a_batch(
    seconds: float, steps: int, last_share: float
) -> None:
    trained = paced(World(), until=at(seconds)).train(initial_model(), JOB)
    assert (steps, last_share) == (trained.num_steps, trained.last_share)
    assert STEP == trained.step_seconds, "a short step would make the device look fast"


def test_a_single_step_is_as_short_as_the_plan_has_it() -> None:
    """Where a whole one does not fit T_th; what it takes still says how long a whole one takes."""
    world = World()
    trained = paced(world, until=at(0.25)).train(initial_model(), replace(JOB, num_steps=1, last_share=0.5))
    assert (1, 0.5, STEP) == (trained.num_steps, trained.last_share, trained.step_seconds)
    assert 100.25 == world.now


def test_a_plan_with_a_short_last_step_is_followed() -> None:
    world = World()
    trained = paced(world).train(initial_model(), replace(JOB, last_share=0.25))
    assert (4, 0.25) == (trained.num_steps, trained.last_share)
    assert pytest.approx(3.25 * STEP) == world.now - 100.0


def test_a_task_that_was_given_up_ends_by_the_clock_too() -> None:
    given_up = False

    def check() -> None:
        if given_up:
            raise RuntimeError("given up")

    def on_train(window: Window, selected: tuple[str, ...]) -> None:
        nonlocal given_up
        given_up = True

    world = World()
    trainer = WatchedTrainer(paced(world, until=at(1e9)), check, on_train)
    with pytest.raises(RuntimeError, match="given up"):
        trainer.train(initial_model(), JOB)
    assert 100.0 == world.now, "it made steps that nobody wanted"


def test_a_training_by_the_clock_has_a_largest_number_of_steps() -> None:
    assert 9 == paced(World(), until=at(1e9, max_steps=9)).train(initial_model(), JOB).num_steps


def test_a_device_that_becomes_slower_while_it_trains_still_ends_in_time() -> None:
    world = World()
    expected = paced(world, until=at(10.0)).train(initial_model(), JOB)
    slower = World(per_step=2 * STEP)
    assert expected.num_steps == 20
    assert 10 == paced(slower, until=at(10.0)).train(initial_model(), JOB).num_steps
    assert pytest.approx(world.now) == slower.now
