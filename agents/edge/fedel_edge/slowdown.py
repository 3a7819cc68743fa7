"""A trainer made slower, as if it ran on a slower device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from fedel.strategies.base import WrappedTrainer
from fedel.types import LocalWork, Tensors, TimingProfile, Trained, Trainer, TrainSpec, Window

Clock = Callable[[], float]


class SlowedTrainer(WrappedTrainer):
    """Takes ``slowdown`` times as long: after the work it waits. Adds the probe's time to that of the training.

    Setting ``stop`` ends a wait at once.
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
        # A trainer's own figure does not include waiting for a core that others use.
        self._wait(trained.seconds or self._clock() - begin)
        probe_seconds, self._probe_seconds = self._probe_seconds, 0.0
        if not trained.seconds:
            return trained
        return replace(trained, seconds=trained.seconds * self._slowdown + probe_seconds)

    def _wait(self, busy: float) -> None:
        if self._slowdown > 1:
            self._stop.wait((self._slowdown - 1) * busy)
