"""FedAvg (McMahan et al., 2017): every client trains the whole model; the mean is weighted by samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedel.strategies.base import (
    WEIGHTINGS,
    MeanFold,
    Method,
    draw,
    one_of,
    task_for,
    train_spec_for,
    update_of,
    whole,
    whole_step,
)
from fedel.types import Fold, Memory, ModelSpec, Plan, RoundContext, Task, Tensors, Trainer, Update


@dataclass(frozen=True)
class FedAvg(Method):
    name: ClassVar[str] = "fedavg"

    weighting: str = "samples"
    """How much a client counts in the mean: ``samples`` or ``uniform``."""

    def __post_init__(self) -> None:
        one_of("weighting", self.weighting, WEIGHTINGS)

    def plan(self, context: RoundContext) -> Plan:
        return Plan(tuple(task_for(context, client) for client in draw(context)))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        spec = trainer.spec
        train_spec = train_spec_for(task, trainer, {t.name for t in spec.weights}, whole(spec))
        trained = trainer.train(model, train_spec)
        cost = whole_step(spec, trainer.profile)
        return update_of(task, model, trainer, train_spec, trained, cost), memory

    def fold(self, spec: ModelSpec) -> Fold:
        return MeanFold(spec, self.weighting)
