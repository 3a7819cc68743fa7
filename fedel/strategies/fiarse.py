"""FIARSE (Wu et al., 2024): a slow client trains the largest weights of the model (algorithms 10).

Unstructured sparsity saves time only on hardware that skips zeros, so there are two clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedel.core.sparsity import gradient_factor, magnitude_threshold, maskable
from fedel.core.timing import fits
from fedel.strategies.base import (
    WEIGHTINGS,
    MeanFold,
    Method,
    check_damping,
    check_scope,
    draw,
    one_of,
    statistics_cost,
    task_for,
    train_spec_for,
    update_of,
    whole,
    whole_step,
)
from fedel.types import (
    FREE,
    Fold,
    Hook,
    Memory,
    ModelSpec,
    Patch,
    Plan,
    RoundContext,
    StepCost,
    Task,
    Tensors,
    Trainer,
    Training,
    Update,
    Value,
)

CLOCKS = ("honest", "optimistic")


@dataclass(frozen=True)
class FIARSE(Method):
    name: ClassVar[str] = "fiarse"
    sends_parts: ClassVar[bool] = True

    budget_scope: str = "backward"
    """What counts against T_th: ``backward``, as in the paper's simulation, or ``train``, the whole step."""
    clock: str = "honest"
    """What a step is said to cost: ``honest``, as dense kernels do, or ``optimistic``, linear in the weights
    kept, as the literature assumes."""
    static_norm: bool = True
    """Batch norm uses batch statistics only; those of the whole model, which is tested, are measured before
    training. Otherwise clients send the statistics of their masked models."""
    weighting: str = "uniform"
    """How much a client counts in the mean: ``uniform`` or ``samples``."""
    damping: float = 0.0
    """How much less a value moves the fewer clients trained it: ``share ** damping`` of the way to their mean,
    where share is their part of the round's clients, by weight. 0: all the way, as in the paper."""

    def __post_init__(self) -> None:
        check_scope(self.budget_scope)
        one_of("clock", self.clock, CLOCKS)
        one_of("weighting", self.weighting, WEIGHTINGS)
        check_damping(self.damping)

    def plan(self, context: RoundContext) -> Plan:
        tasks = []
        for client in draw(context):
            seconds = whole_step(context.spec, client.profile).total(self.budget_scope)
            gamma = min(1.0, context.budget_seconds / seconds) if seconds > 0 else 1.0
            tasks.append(task_for(context, client, {"gamma": gamma}))
        return Plan(tuple(tasks))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        spec, gamma = trainer.spec, task.settings["gamma"]
        masked = maskable(spec)
        train_spec = replace(
            train_spec_for(task, trainer, {t.name for t in spec.weights}, whole(spec)),
            static_norm=self.static_norm,
            hooks=(LargeWeights(masked, magnitude_threshold(model, masked, gamma)),),
        )
        trained = trainer.train(model, train_spec)
        trained = replace(trained, patches=changed(model, trained.patches, masked))
        cost = whole_step(spec, trainer.profile)
        if self.clock == "optimistic":
            cost = StepCost(gamma * cost.forward_seconds, gamma * cost.backward_seconds)
        over = not fits(cost.total(self.budget_scope), task.budget_seconds)
        probe = statistics_cost(task, trainer) if self.static_norm else FREE
        update = update_of(task, model, trainer, train_spec, trained, cost, probe=probe, over_budget=over)
        return update, memory

    def fold(self, spec: ModelSpec) -> Fold:
        return MeanFold(spec, self.weighting, self.damping)


@dataclass(frozen=True)
class LargeWeights(Hook):
    """The model is its large weights, found again in every forward pass: w * [|w| >= theta] (section 3)."""

    names: tuple[str, ...]
    """Tensors that the threshold masks."""
    threshold: float

    def reweighted(self) -> tuple[str, ...]:
        return self.names

    def used_weight(self, weight: Value) -> Value:
        # The factor belongs to this use of the weight, so it is applied to a view and not to the parameter.
        view = weight.view_as(weight)
        if view.requires_grad:
            view.register_hook(lambda gradient: gradient * gradient_factor(weight.detach(), self.threshold))
        return view * (weight.abs() >= self.threshold)

    def finish(self, training: Training) -> None:
        """Weight decay has moved weights that took no part: undo it, to the bit."""
        for name in self.names:
            if name in training.weights:
                weight, start = training.weights[name], training.start(name)
                weight.copy_(weight.where(abs(start) >= self.threshold, start))


def changed(model: Tensors, patches: Mapping[str, Patch], masked: Collection[str]) -> dict[str, Patch]:
    """The patches with maskable tensors cut to the values that moved: a client counts nowhere else."""
    cut = {}
    for name, patch in patches.items():
        moved = patch.values != model[name] if name in masked else np.ones(1, dtype=bool)
        if moved.all():
            cut[name] = patch
        elif moved.any():
            cut[name] = Patch(patch.values[moved], moved)
    return cut
