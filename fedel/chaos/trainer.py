"""The trainer of a drill's agents: no torch, the same bits every time, and rounds that take a moment."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fedel import testing
from fedel.job import RunConfig
from fedel.seeds import generator
from fedel.strategies.base import WrappedTrainer
from fedel.training.settings import Evaluator, TrainerSettings
from fedel.types import ModelSpec, Tensors, Trained, Trainer, TrainSpec

NAME = "fedel.chaos.trainer:make_trainer"


@lru_cache(maxsize=4)
def spec_of(scale: int) -> ModelSpec:
    """The fake model of ``fedel.testing`` with every side of every tensor ``scale`` times longer."""
    plain = testing.spec()
    longer = (replace(t, shape=tuple(side * scale for side in t.shape)) for t in plain.tensors)
    return replace(plain, tensors=tuple(longer))


def scale_of(run: RunConfig) -> int:
    return int(run.workload.model_options["scale"])


@lru_cache(maxsize=4)
def fleet(num_clients: int, scale: int) -> dict[str, testing.FakeTrainer]:
    return testing.fleet(num_clients, spec_of(scale))


class _Paced(WrappedTrainer):
    """Takes its time; how long differs from task to task."""

    def __init__(self, trainer: Trainer, mean_seconds: float) -> None:
        super().__init__(trainer)
        self._mean_seconds = mean_seconds

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        time.sleep(self._mean_seconds * generator(train_spec.seed, "pace").uniform(0.5, 1.5))
        return super().train(model, train_spec)


def make_trainer(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    """The client of the fleet that the data section names."""
    trainer = fleet(settings.data.of, scale_of(run))[f"client-{settings.data.index}"]
    seconds = float(run.workload.model_options["train_seconds"])
    return _Paced(trainer, seconds), _score if settings.evaluate else None


@dataclass(frozen=True)
class _Score:
    accuracy: float
    loss: float
    num_targets: int = 1


def _score(model: Tensors, _exits: Collection[int]) -> _Score:
    """Any number that the model decides."""
    total = sum(float(np.abs(values).mean()) for values in model.values())
    return _Score(1 / (1 + total), total)
