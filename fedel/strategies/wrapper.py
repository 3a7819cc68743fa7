"""What FedProx and FedNova share: a method around another one, which is like it except where it says so."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from fedel.strategies.base import needed_by
from fedel.strategies.fedavg import FedAvg
from fedel.types import Fold, Memory, ModelSpec, Plan, RoundContext, Strategy, Task, Tensors, Trainer, Update


@dataclass(frozen=True)
class Wrapper:
    """Everything as ``base`` does it; a subclass replaces the part that it changes."""

    base: Strategy = field(default_factory=FedAvg)
    """The method that is wrapped."""

    @property
    def weighting(self) -> str:
        return self.base.weighting

    @property
    def damping(self) -> float:
        return float(getattr(self.base, "damping", 0.0))

    @property
    def budget_scope(self) -> str:
        return self.base.budget_scope

    @property
    def fits_steps(self) -> bool:
        return self.base.fits_steps

    @property
    def widths(self) -> tuple[float, ...]:
        return self.base.widths

    @property
    def sends_parts(self) -> bool:
        return self.base.sends_parts

    @property
    def fits_memory(self) -> bool:
        return self.base.fits_memory

    def exits_to_average(self, spec: ModelSpec) -> tuple[int, ...]:
        return self.base.exits_to_average(spec)

    def plan(self, context: RoundContext) -> Plan:
        return self.base.plan(context)

    def tensors_needed(self, task: Task, memory: Memory, trainer: Trainer) -> Collection[str] | None:
        return needed_by(self.base, task, memory, trainer)

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        return self.base.fit(task, model, memory, trainer)

    def fold(self, spec: ModelSpec) -> Fold:
        return self.base.fold(spec)
