from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import pytest
from fedel_edge.slow import Abandoned, PacedTrainer, WatchedTrainer

from fedel.strategies import FedEL, HeteroFL
from fedel.types import LocalWork, Memory, Task, Tensors, Trained, TrainSpec, Window
from tests.strategies.fakes import WORK, FakeTrainer, initial_model, profile, spec

SPEC = spec()


@dataclass(frozen=True)
class Timed(FakeTrainer):
    """Reports two seconds of training."""

    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        return replace(super().train(model, job), seconds=2.0)


class Waits(threading.Event):
    """An event that writes down how long it was waited for, instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        return False


class Ticks:
    """A clock on which everything takes half a second."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


TIMED = Timed(1, 20, profile())
JOB = TrainSpec(WORK, 4, 1, frozenset({SPEC.weights[0].name}), (1,))


def test_a_slow_device_waits_and_reports_that_many_times_the_seconds() -> None:
    waits = Waits()
    trainer = PacedTrainer(TIMED, 3.0, waits, Ticks())
    trainer.probe(initial_model(), Window(1, 2), WORK, 1)
    trained = trainer.train(initial_model(), JOB)
    assert [pytest.approx(2 * 0.5), pytest.approx(2 * 2.0)] == waits.seconds
    assert pytest.approx(3 * (0.5 + 2.0)) == trained.seconds
    assert pytest.approx(3 * 2.0) == trainer.train(initial_model(), JOB).seconds
    assert TIMED.profile.scaled(3.0) == trainer.profile


def test_a_device_as_it_is_does_not_wait_but_counts_the_probe() -> None:
    waits = Waits()
    trainer = PacedTrainer(TIMED, 1.0, waits, Ticks())
    trainer.probe(initial_model(), Window(1, 2), WORK, 1)
    assert pytest.approx(2.5) == trainer.train(initial_model(), JOB).seconds
    assert [] == waits.seconds
    assert TIMED.profile is trainer.profile


def test_a_drain_ends_the_wait_at_once() -> None:
    stop = threading.Event()
    stop.set()
    slow = PacedTrainer(TIMED, 1e6, stop)
    assert pytest.approx(2e6) == slow.train(initial_model(), JOB).seconds


def test_training_is_announced_with_the_cost_that_the_report_predicts() -> None:
    told: list[tuple[Window, tuple[str, ...], float]] = []
    trainer = WatchedTrainer(TIMED, threading.Event(), lambda *news: told.append(news))
    task = Task(0, "c", 0.1, WORK, 1)
    update, _ = FedEL().fit(task, initial_model(), Memory(), trainer)
    report = update.report
    planned = report.cost.total("train") * report.num_steps
    assert [(report.window, report.selected, pytest.approx(planned))] == told


def test_a_narrowed_model_is_announced_at_its_own_cost() -> None:
    told: list[float] = []
    trainer = WatchedTrainer(TIMED, threading.Event(), lambda *news: told.append(news[2]))
    task = Task(0, "c", 0.1, WORK, 1, settings={"width": 0.5})
    update, _ = HeteroFL().fit(task, initial_model(), Memory(), trainer)
    planned = update.report.cost.total("train") * update.report.num_steps
    assert [pytest.approx(planned)] == told


def test_a_task_that_was_given_up_begins_nothing() -> None:
    given_up = threading.Event()
    given_up.set()
    trainer = WatchedTrainer(TIMED, given_up, lambda *_: pytest.fail("announced"))
    with pytest.raises(Abandoned):
        trainer.probe(initial_model(), Window(1, 2), LocalWork(), 1)
    with pytest.raises(Abandoned):
        trainer.train(initial_model(), JOB)
