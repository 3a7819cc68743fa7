from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import pytest
from fedel_edge.slowdown import SlowedTrainer

from fedel.types import Tensors, Trained, TrainSpec, Window
from tests.strategies.fakes import WORK, FakeTrainer, initial_model, profile, spec

SPEC = spec()


@dataclass(frozen=True)
class Timed(FakeTrainer):
    """Reports two seconds of training."""

    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        return replace(super().train(model, job), seconds=2.0)


class Waits(threading.Event):
    """An event that records how long it was waited for, instead of waiting."""

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


def test_waits_and_reports_the_longer_time() -> None:
    waits = Waits()
    trainer = SlowedTrainer(TIMED, 3.0, waits, Ticks())
    trainer.probe(initial_model(), Window(1, 2), WORK, 1)
    trained = trainer.train(initial_model(), JOB)
    assert [pytest.approx(2 * 0.5), pytest.approx(2 * 2.0)] == waits.seconds
    assert pytest.approx(3 * (0.5 + 2.0)) == trained.seconds
    assert pytest.approx(3 * 2.0) == trainer.train(initial_model(), JOB).seconds
    assert TIMED.profile.scaled(3.0) == trainer.profile


def test_no_slowdown_only_counts_the_probe() -> None:
    waits = Waits()
    trainer = SlowedTrainer(TIMED, 1.0, waits, Ticks())
    trainer.probe(initial_model(), Window(1, 2), WORK, 1)
    assert pytest.approx(2.5) == trainer.train(initial_model(), JOB).seconds
    assert [] == waits.seconds
    assert TIMED.profile is trainer.profile


def test_stop_ends_the_wait() -> None:
    stop = threading.Event()
    stop.set()
    slow = SlowedTrainer(TIMED, 1e6, stop)
    assert pytest.approx(2e6) == slow.train(initial_model(), JOB).seconds
