"""FedProx (Li et al., 2020) around any method: local training is held near the model it started from.

Each step adds ``mu * (w - w_r)`` to the gradient of every tensor that trains; what a method freezes does not
move anyway, so with FedEL the term acts inside the window only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from fedel.core.steps import effective_steps
from fedel.strategies.base import HookedTrainer
from fedel.strategies.wrapper import Wrapper
from fedel.types import Hook, Memory, Task, Tensors, Trained, Trainer, Training, TrainSpec, Update


@dataclass(frozen=True)
class FedProx(Wrapper):
    name: ClassVar[str] = "fedprox"

    mu: float = 0.01
    """Strength of the pull towards the round's starting model."""

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ValueError(f"mu = {self.mu:g}: the proximal term needs a value of at least 0")

    tensors_needed = Wrapper.tensors_needed  # the pull looks at what trains, no further

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        return self.base.fit(task, model, memory, _PullingTrainer(trainer, self.mu) if self.mu else trainer)


@dataclass(frozen=True)
class Pull(Hook):
    """Towards the model of the round, after momentum: FedNova counts effective steps that way."""

    mu: float

    def step(self, training: Training, take_step: Callable[[], None]) -> None:
        away = {name: weight - training.start(name) for name, weight in training.weights.items()}
        take_step()
        for name, distance in away.items():
            training.weights[name].sub_(distance, alpha=training.work.lr * self.mu)


class _PullingTrainer(HookedTrainer):
    """The importance probe needs no pull: its trial step starts at w_r, where the proximal gradient is zero."""

    def __init__(self, trainer: Trainer, mu: float) -> None:
        super().__init__(trainer, Pull(mu))
        self._mu = mu

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        trained = super().train(model, train_spec)
        steps = effective_steps(trained.num_steps, train_spec.work, self._mu)
        return replace(trained, effective_steps=steps)
