"""Tasks of several clients in one worker, whose trainings are done side by side (``compute = "fast"``).

A method's ``fit`` depends on its arguments only. So it is called until it asks for a training, and called again
once the trainings of all clients are done: what it asks for the second time is answered as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedel.strategies.base import WrappedTrainer
from fedel.types import LocalWork, Tensors, Trained, Trainer, TrainSpec, Window

NUM_TOGETHER = 5
"""Clients side by side, whatever the number of workers: it decides how sums are rounded."""

Result = TypeVar("Result")


@dataclass(eq=False)
class Wanted(Exception):
    """A training that is not done yet."""

    trainer: Trainer
    model: Tensors
    train_spec: TrainSpec


class Replayed(WrappedTrainer):
    """Answers from ``answers`` as long as there are any; then it probes, and leaves training to others."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.answers: list[Any] = []
        self._place = 0

    def again(self) -> Replayed:
        self._place = 0
        return self

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        if self._place == len(self.answers):
            self.answers.append(super().probe(model, window, work, seed))
        return self._next()  # type: ignore[no-any-return]

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        if self._place == len(self.answers):
            raise Wanted(self._trainer, model, train_spec)
        return self._next()  # type: ignore[no-any-return]

    def _next(self) -> Any:
        self._place += 1
        return self.answers[self._place - 1]


def all_of(
    fits: Sequence[Callable[[Trainer], Result]],
    trainers: Sequence[Trainer],
    train_all: Callable[[Sequence[Wanted]], Sequence[Trained]],
) -> list[Result]:
    """The results of ``fits``, each called with its trainer, in this order."""
    replayed = [Replayed(trainer) for trainer in trainers]
    results: dict[int, Result] = {}
    while len(results) < len(fits):
        wanted: dict[int, Wanted] = {}
        for place, (fit, trainer) in enumerate(zip(fits, replayed, strict=True)):
            if place not in results:
                try:
                    results[place] = fit(trainer.again())
                except Wanted as training:
                    wanted[place] = training
        for place, trained in zip(wanted, train_all(list(wanted.values())), strict=True):
            replayed[place].answers.append(trained)
    return [results[place] for place in range(len(fits))]
