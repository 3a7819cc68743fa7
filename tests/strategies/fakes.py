"""What tests of methods share; the fake fleet of ``fedel.testing`` is exported from here too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedel.core.timing import budget, full_steps
from fedel.testing import (
    BLOCKS,
    NUM_CLASSES,
    WORK,
    FakeTrainer,
    fleet,
    frozen_spec,
    initial_model,
    profile,
    spec,
)
from fedel.types import (
    ClientView,
    LocalWork,
    Report,
    RoundContext,
    Tensors,
    Trained,
    Trainer,
    TrainSpec,
)

__all__ = [
    "BLOCKS",
    "NUM_CLASSES",
    "WORK",
    "FakeTrainer",
    "Recorder",
    "context_of",
    "fleet",
    "frozen_spec",
    "initial_model",
    "profile",
    "same_bits",
    "spec",
]


@dataclass(frozen=True)
class Recorder(FakeTrainer):
    """Keeps what it was asked to train."""

    asked: list[TrainSpec] = field(default_factory=list)

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        self.asked.append(train_spec)
        return super().train(model, train_spec)


def context_of(
    clients: Mapping[str, Trainer],
    round_num: int = 0,
    seed: int = 1,
    num_participants: int = 0,
    budget_seconds: float = 0.0,
    work: LocalWork = WORK,
    state: Mapping[str, Any] | None = None,
    last: Mapping[str, Report] | None = None,
) -> RoundContext:
    """What a plan gets to see of these clients; a budget of 0 is the fastest client's."""
    return RoundContext(
        round_num,
        seed,
        next(iter(clients.values())).spec,
        [ClientView(n, c.num_samples, c.profile, (last or {}).get(n)) for n, c in clients.items()],
        num_participants,
        budget_seconds or budget(full_steps([c.profile for c in clients.values()], "backward")),
        work,
        state=state or {},
    )


def same_bits(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(one[n].tobytes() == other[n].tobytes() for n in one)
