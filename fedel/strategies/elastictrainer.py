"""ElasticTrainer (Huang et al., 2023) in a federation: the best tensors of the whole model within the budget.

The forward pass always runs through the whole network and only local importance decides, so a slow device
keeps training the tensors near the output (paper, section 3). Re-selected every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedel.core.budgeted import SELECTIONS, choose, less_probe, probe_cost, window_cost
from fedel.core.importance import local
from fedel.strategies.base import (
    WEIGHTINGS,
    MeanFold,
    Method,
    check_scope,
    draw,
    one_of,
    task_for,
    train_spec_for,
    update_of,
    whole,
)
from fedel.types import (
    Fold,
    Memory,
    ModelSpec,
    Plan,
    RoundContext,
    Task,
    Tensors,
    Trainer,
    Update,
)


@dataclass(frozen=True)
class ElasticTrainer(Method):
    name: ClassVar[str] = "elastictrainer"

    budget_scope: str = "backward"
    """What counts against T_th: ``backward``, as in the paper's simulation, or ``train``, the whole step."""
    dp: str = "exact"
    """Tensor selection: ``exact``, or ``official`` for the reference's own dynamic programme."""
    weighting: str = "uniform"
    """How much a client counts in the masked mean: ``uniform`` or ``samples``."""
    probe_in_budget: bool = False
    """Take the importance probe's time out of T_th; otherwise it comes on top, as in the paper."""

    def __post_init__(self) -> None:
        check_scope(self.budget_scope)
        one_of("dp", self.dp, SELECTIONS)
        one_of("weighting", self.weighting, WEIGHTINGS)

    def plan(self, context: RoundContext) -> Plan:
        return Plan(tuple(task_for(context, client) for client in draw(context)))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        spec, profile = trainer.spec, trainer.profile
        window, budget = whole(spec), task.budget_seconds
        importance = local(trainer.probe(model, window, task.work, task.seed))
        probe = probe_cost(spec, profile, window)
        if self.probe_in_budget:
            steps = task.work.steps_for(trainer.num_samples)
            budget = less_probe(budget, probe.total(self.budget_scope), steps)
        selected, in_budget = choose(spec, profile, window, importance, budget, self.budget_scope, self.dp)
        train_spec = train_spec_for(task, trainer, selected, window)
        trained = trainer.train(model, train_spec)
        cost = window_cost(spec, profile, selected, window)
        update = update_of(
            task,
            model,
            trainer,
            train_spec,
            trained,
            cost,
            window,
            probe=probe,
            over_budget=not in_budget,
        )
        return update, memory

    def fold(self, spec: ModelSpec) -> Fold:
        return MeanFold(spec, self.weighting)
