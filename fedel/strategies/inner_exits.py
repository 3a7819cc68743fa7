"""Exits inside a window that train too, and answer together: the options ``answer`` and ``teach``.

The paper trains a window through the exit at its front alone. Here exits inside the window have losses of
their own; with ``teach`` each of them also learns from the mean of the others' logits. Exits cost time, and pay
for it like all else: ``InnerExits`` says through which exits a window trains, so that prices have them in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fedel.strategies.base import HookedTrainer
from fedel.types import Hook, ModelSpec, Trainer, Training, Value


def check_answer(answer: float) -> None:
    if not 0 <= answer <= 1:
        raise ValueError(f"answer = {answer:g}: a share of the exits lies between 0 and 1")


def answering(spec: ModelSpec, share: float) -> tuple[int, ...]:
    """The exits that answer together, the deepest last; none where that would be the last one alone."""
    number = math.ceil(share * spec.num_blocks)
    return tuple(range(spec.num_blocks - number + 1, spec.num_blocks + 1)) if number > 1 else ()


@dataclass(frozen=True)
class Teaching(Hook):
    """Adds to the loss how far each exit is from what the others say together."""

    all_exits: ClassVar[bool] = True

    strength: float

    def loss(self, training: Training, loss: Value, logits: Sequence[Value], targets: Value) -> Value:  # noqa: ARG002
        return loss + self.strength * lessons(logits) if len(logits) > 1 else loss


class InnerExits(HookedTrainer):
    """A trainer of windows in which these exits train wherever they are inside."""

    def __init__(self, trainer: Trainer, exits: Collection[int], *hooks: Hook) -> None:
        super().__init__(trainer, *hooks)
        self._spec = replace(trainer.spec, inner_exits=frozenset(exits))

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
