"""The trainer of the benchmark's clients: trains nothing, and returns one of two sets of values by turns.

So every round changes every tensor that was selected; what does not change would not be sent to clients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from fedel.bench.workloads import Workload, values, workload
from fedel.job import RunConfig
from fedel.testing import profile
from fedel.training.settings import Evaluator, TrainerSettings
from fedel.types import (
    Array,
    LocalWork,
    ModelSpec,
    Patch,
    Role,
    Tensors,
    TimingProfile,
    Trained,
    Trainer,
    TrainSpec,
    Window,
)

NAME = "fedel.bench.trainer:make_trainer"
NUM_SPEEDS = 4
"""Clients are 1 to 4 times slower than the fastest, so that methods that select have something to do."""


@dataclass(frozen=True)
class NoTrainer:
    """The Trainer port; what a method selects is what comes back."""

    workload: Workload
    profile: TimingProfile
    num_samples: int
    classes: tuple[int, ...] = ()
    same_inputs: bool = False
    _turns: Iterator[int] = field(default_factory=itertools.count)

    @property
    def spec(self) -> ModelSpec:
        return self.workload.spec

    def profile_again(self) -> bool:
        return False

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:  # noqa: ARG002
        weights = self.spec.weights_in(window.end, window.front)
        return {t.name: -1.0 - (place + seed) % 7 for place, t in enumerate(weights)}

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:  # noqa: ARG002
        new = trained_values(self.workload.name, next(self._turns) % 2)
        patches = {
            t.name: Patch(new[t.name])
            for t in self.spec.tensors
            if t.name in train_spec.selected or (t.role is Role.EXIT and t.block in train_spec.exits)
        }
        return Trained(patches, train_spec.num_steps, float(train_spec.num_steps), loss=1.0)


@lru_cache(maxsize=2)
def trained_values(name: str, turn: int = 0) -> dict[str, Array]:
    """One copy for all clients of a process."""
    return values(workload(name), seed=1 + turn)


def make_trainer(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    of, index = workload(str(run.workload.model_options["size"])), settings.data.index
    return NoTrainer(of, timing(of, 1 + index % NUM_SPEEDS), 100 + index), None


def timing(of: Workload, slowness: int) -> TimingProfile:
    """As in ``fedel.testing``, but a step of the fastest client takes about a second, whatever the model."""
    made = profile(1.0, of.spec)
    seconds = sum(t.grad_seconds + t.update_seconds for t in made.tensors)
    return made.scaled(slowness / seconds, f"bench/{slowness}")
