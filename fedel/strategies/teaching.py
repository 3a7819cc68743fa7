"""Exits inside a window that train too, and learn from each other: FedEL's option ``teach``.

The paper trains a window through the exit at its front alone. Here every block of the window has its loss, and
each exit also learns from the mean of the others' logits. Exits cost time, and pay for it like all else: a
``TaughtTrainer`` says that a window trains through all its exits, so that every price has them in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fedel.strategies.base import HookedTrainer
from fedel.types import Hook, ModelSpec, Trainer, Training, Value


@dataclass(frozen=True)
class Teaching(Hook):
    """Adds to the loss how far each exit is from what the others say together."""

    all_exits: ClassVar[bool] = True

    strength: float

    def loss(self, training: Training, loss: Value, logits: Sequence[Value], targets: Value) -> Value:  # noqa: ARG002
        return loss + self.strength * lessons(logits) if len(logits) > 1 else loss


class TaughtTrainer(HookedTrainer):
    """A trainer of windows in which all exits train and teach each other."""

    def __init__(self, trainer: Trainer, strength: float) -> None:
        super().__init__(trainer, Teaching(strength))
        self._spec = replace(trainer.spec, all_exits=True)

    @property
    def spec(self) -> ModelSpec:
        return self._spec


def lessons(logits: Sequence[Value]) -> Value:
    """How far each exit is from the mean of the others' logits, which is fixed: the mean of the divergences."""
    flat = [z.flatten(0, -2) for z in logits]
    total = 0.0
    for i, own in enumerate(flat):
        others = sum(z.detach() for j, z in enumerate(flat) if j != i) / (len(flat) - 1)
        teacher, student = others.log_softmax(-1), own.log_softmax(-1)
        total = total + (teacher.exp() * (teacher - student)).sum() / len(own)
    return total / len(flat)
