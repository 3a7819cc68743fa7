"""A trainer on a real clock: it ends when T_th is over. It can stand for a slower device, too."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fedel.strategies.base import WrappedTrainer
from fedel.types import LocalWork, Tensors, TimingProfile, Trained, Trainer, TrainSpec, Window

Clock = Callable[[], float]
RECENT = 9
"""Steps from which the length of the next one is guessed."""


@dataclass(frozen=True)
class Clocks:
    """What tells the time; tests bring their own."""

    now: Clock = time.perf_counter
    busy: Clock = time.thread_time
    """How long the thread has computed. Waiting for a core that others use does not make a device slower."""


@dataclass(frozen=True)
class Until:
    """When a training ends."""

    moment: Callable[[TrainSpec], float]
    """On the clock, once it is known what is trained and so what is to be sent."""
    max_steps: int
    part_of_batch: Callable[[float], float]
    """The share of a batch for which so much of a step's time pays; 0 where it is not worth a step."""


class PacedTrainer(WrappedTrainer):
    """Takes ``slowdown`` times as long: after each step it waits. Adds the probe's time to that of the steps.

    With ``until`` the training ends at that moment, with a step on a part of a batch, and after one step at the
    least. Setting ``stop`` ends a wait at once.
    """

    def __init__(
        self,
        trainer: Trainer,
        stop: threading.Event,
        slowdown: float = 1.0,
        until: Until | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        super().__init__(trainer)
        self._stop, self._slowdown, self._until = stop, slowdown, until
        self._clocks = clocks or Clocks()
        self._probe_seconds = 0.0
        self._profile = trainer.profile if slowdown == 1 else trainer.profile.scaled(slowdown)

    @property
    def profile(self) -> TimingProfile:
        return self._profile

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        begin, busy = self._clocks.now(), self._clocks.busy()
        change = self._trainer.probe(model, window, work, seed)
        self._wait(self._clocks.busy() - busy)
        self._probe_seconds += self._clocks.now() - begin
        return change

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        begin = self._clocks.now()
        pace = _StepPace(self._clocks, self._wait, train_spec, self._until)
        trained = self._trainer.train(model, replace(train_spec, pace=pace))
        seconds, probe_seconds = self._clocks.now() - begin, self._probe_seconds
        self._probe_seconds = 0.0
        if not trained.seconds:
            return trained  # nothing ran on a clock
        return replace(
            trained,
            seconds=seconds + probe_seconds,
            probe_seconds=probe_seconds,
            step_seconds=statistics.median(pace.seconds) if pace.seconds else 0.0,
        )

    def _wait(self, busy_seconds: float) -> None:
        if self._slowdown > 1:
            self._stop.wait((self._slowdown - 1) * busy_seconds)


class _StepPace:
    """Asked before each step: waits for what the last one left to wait, then looks at the clock."""

    def __init__(
        self, clocks: Clocks, wait: Callable[[float], None], train_spec: TrainSpec, until: Until | None
    ) -> None:
        self._clocks, self._wait, self._spec = clocks, wait, train_spec
        self._until, self._ends_at = until, until.moment(train_spec) if until else 0.0
        self._last, self._busy = clocks.now(), clocks.busy()
        self._share = 1.0
        self.seconds: list[float] = []
        """Of each step, with the wait after it. A short one tells less, and counts if there is no other."""

    def next_share(self, num_done: int) -> float:
        if num_done:
            self._wait(self._clocks.busy() - self._busy)
            if self._share == 1 or not self.seconds:
                self.seconds.append((self._clocks.now() - self._last) / self._share)
        planned = self._spec.next_share(num_done)
        self._share = self._in_time(num_done, self._until) if num_done and self._until else planned
        self._last, self._busy = self._clocks.now(), self._clocks.busy()
        return self._share

    def _in_time(self, num_done: int, until: Until) -> float:
        if num_done >= until.max_steps or self._share < 1:
            return 0.0
        left = self._ends_at - self._clocks.now()
        return until.part_of_batch(left / statistics.median(self.seconds[-RECENT:]))
