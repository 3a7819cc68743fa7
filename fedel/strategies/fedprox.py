"""FedProx (Li et al., 2020) around any method: local training is held near the model it started from.

Each step adds ``mu * (w - w_r)`` to the gradient of every tensor that trains; what a method freezes does not
move anyway, so with FedEL the term acts inside the window alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedel.strategies.base import WrappedTrainer
from fedel.strategies.wrapper import Wrapper
from fedel.types import Job, Memory, Task, Tensors, Trained, Trainer, Update


@dataclass(frozen=True)
class FedProx(Wrapper):
    name: ClassVar[str] = "fedprox"

    mu: float = 0.01
    """Strength of the pull towards the round's starting model."""

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ValueError(f"mu = {self.mu:g}: the proximal term needs a value of at least 0")

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        return self.base.fit(task, model, memory, _Proximal(trainer, self.mu))


class _Proximal(WrappedTrainer):
    """A trainer that adds the proximal term to every job.

    The importance probe needs none: its trial step starts at w_r, where the proximal gradient is zero.
    """

    def __init__(self, trainer: Trainer, mu: float) -> None:
        super().__init__(trainer)
        self._mu = mu

    def train(self, model: Tensors, job: Job) -> Trained:
        return super().train(model, replace(job, proximal=self._mu))
