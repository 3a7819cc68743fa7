"""Trainers that wrap another one: made slower, as if on a slower device, and watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from fedel.core.timing import step_cost, width_step
from fedel.strategies.base import WrappedTrainer
from fedel.types import LocalWork, Tensors, TimingProfile, Trained, Trainer, TrainSpec, Window

Clock = Callable[[], float]


class Abandoned(Exception):
    """Nobody wants the result any more."""


class PacedTrainer(WrappedTrainer):
    """Takes ``slowdown`` times as long: after the work it waits. Measures the probe, which training counts.

    ``stop`` ends a wait at once.
    """

    def __init__(
        self, trainer: Trainer, slowdown: float, stop: threading.Event, clock: Clock = time.perf_counter
    ) -> None:
        super().__init__(trainer)
        self._slowdown, self._stop, self._clock = slowdown, stop, clock
        self._probe_seconds = 0.0
        self._profile = trainer.profile if slowdown == 1 else trainer.profile.scaled(slowdown)

    @property
    def profile(self) -> TimingProfile:
        return self._profile

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        begin = self._clock()
        change = self._trainer.probe(model, window, work, seed)
        busy = self._clock() - begin
        self._wait(busy)
        self._probe_seconds += busy * self._slowdown
        return change

    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        begin = self._clock()
        trained = self._trainer.train(model, job)
        # A trainer's own figure does not count waiting for a core that others use.
        self._wait(trained.seconds or self._clock() - begin)
        probe_seconds, self._probe_seconds = self._probe_seconds, 0.0
        if not trained.seconds:
            return trained
        return replace(trained, seconds=trained.seconds * self._slowdown + probe_seconds)

    def _wait(self, busy: float) -> None:
        if self._slowdown > 1:
            self._stop.wait((self._slowdown - 1) * busy)


OnTrain = Callable[[Window, tuple[str, ...], float], None]
"""Called with the window, the tensors and the predicted seconds when training begins."""


class WatchedTrainer(WrappedTrainer):
    """Tells what is about to be trained, and refuses to begin once the task is given up."""

    def __init__(self, trainer: Trainer, given_up: threading.Event, on_train: OnTrain) -> None:
        super().__init__(trainer)
        self._given_up, self._on_train = given_up, on_train

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        self._check()
        return self._trainer.probe(model, window, work, seed)

    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        self._check()
        selected = tuple(t.name for t in self.spec.weights if t.name in job.selected)
        self._on_train(Window(job.end, max(job.exits)), selected, self.planned_seconds(job))
        trained = self._trainer.train(model, job)
        self._check()
        return trained

    def planned_seconds(self, job: TrainSpec) -> float:
        if job.width < 1:
            cost = width_step(self.profile, job.width)
        else:
            cost = step_cost(self.profile, job.selected, job.exits, job.end, self.spec.exit_each)
        return cost.total("train") * job.num_steps

    def _check(self) -> None:
        if self._given_up.is_set():
            raise Abandoned
