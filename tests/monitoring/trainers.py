"""A trainer whose rounds a test lets go one by one, and which takes as long as its profile says, or longer."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace

from fedel.core.timing import step_cost
from fedel.job import RunConfig
from fedel.strategies.base import WrappedTrainer
from fedel.training.settings import Evaluator, HeldOut, TrainerSettings
from fedel.types import Tensors, Trained, Trainer, TrainSpec
from tests.agents.trainers import FakeScore, score
from tests.strategies.fakes import fleet

turns = threading.Semaphore(0)
"""One for each client and round."""
HOT = 3
"""The client that takes three times as long as its profile promises."""
_PATIENCE_SECONDS = 60.0
_never = threading.Event()


class _InTurn(WrappedTrainer):
    def __init__(self, trainer: Trainer, factor: float) -> None:
        super().__init__(trainer)
        self._factor = factor

    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        assert turns.acquire(timeout=_PATIENCE_SECONDS)
        cost = step_cost(self.profile, job.selected, job.exits, job.end, self.spec.exit_each)
        seconds = self._factor * cost.total("backward") * job.num_steps
        _never.wait(seconds)
        return replace(super().train(model, job), seconds=seconds, peak_memory_bytes=50_000_000)


class _Test:
    """Tests a model while the next round waits for its turn."""

    def __call__(self, model: Tensors, average: Collection[int]) -> FakeScore:
        return score(model, average)

    def beside_training(self) -> _Test:
        return self


def in_turn(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None, HeldOut | None]:
    index = settings.data.index
    trainer = list(fleet(settings.data.of).values())[index]
    test = _Test() if settings.evaluate else None
    return _InTurn(trainer, 3.0 if index == HOT else 0.5), test, HeldOut(_Test(), 10)
