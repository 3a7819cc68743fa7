"""ElasticTrainer (Huang et al., 2023) in a federation: the best tensors of the whole model within the budget.

The forward pass always runs through the whole network and only local importance decides, so a slow device
keeps training the tensors near the output (paper, section 3). Re-selected every round.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from fedel.core import memory_budget
from fedel.core.budgeted import SELECTIONS, Choice, Prices, choose, choose_in_memory, choose_whole
from fedel.core.importance import local
from fedel.core.timing import SCOPES
from fedel.strategies.base import (
    STEPS,
    WEIGHTINGS,
    MeanFold,
    Method,
    check_damping,
    check_scope,
    draw,
    one_of,
    steps_fit,
    task_for,
    train_spec_for,
    update_of,
)
from fedel.types import (
    FREE,
    Fold,
    Memory,
    ModelSpec,
    Plan,
    RoundContext,
    StepCost,
    Task,
    Tensors,
    Trainer,
    Update,
    Window,
)


@dataclass(frozen=True)
class ElasticTrainer(Method):
    name: ClassVar[str] = "elastictrainer"
    fits_memory: ClassVar[bool] = True

    budget_scope: str = "backward"
    """What counts against T_th: ``backward``, as in the paper's simulation; ``train``, the whole step; or
    ``round``, all that a client does in a round: download, probe, steps, upload."""
    steps: str = ""
    """``plan``: the planned number in every round; ``fit``: as many as T_th pays for. Empty: ``fit``, except in
    scope ``backward``."""
    dp: str = "exact"
    """Tensor selection: ``exact``, or ``official`` for the reference's own dynamic programme."""
    weighting: str = "uniform"
    """How much a client counts in the masked mean: ``uniform`` or ``samples``."""
    damping: float = 0.0
    """How much less a value moves the fewer clients trained it: ``share ** damping`` of the way to their mean,
    where share is their part of the round's clients, by weight. 0: all the way, as in the paper."""
    train_all_that_fits: bool = False
    """Where the whole model fits the budget, train it whole; importance is not needed, nor its probe."""
    probe_in_budget: bool = False
    """Take the importance probe's time out of T_th, as scope ``round`` always does; otherwise it comes on top,
    as in the paper."""

    def __post_init__(self) -> None:
        check_scope(self.budget_scope, SCOPES)
        one_of("steps", self.steps, STEPS)
        one_of("dp", self.dp, SELECTIONS)
        one_of("weighting", self.weighting, WEIGHTINGS)
        check_damping(self.damping)

    @property
    def fits_steps(self) -> bool:
        return steps_fit(self.steps, self.budget_scope)

    def plan(self, context: RoundContext) -> Plan:
        return Plan(tuple(task_for(context, client) for client in draw(context)))

    def tensors_needed(self, task: Task, memory: Memory, trainer: Trainer) -> Collection[str] | None:  # noqa: ARG002
        """All but the early exits, unless every block trains through its own."""
        return trainer.spec.tensors_for(trainer.spec.exits_for(1, trainer.spec.num_blocks))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        prices, window = Prices.of(task, trainer, self.budget_scope), output_side(task, trainer)
        choice, probe = self._choose(task, model, window, trainer, prices)
        train_spec = train_spec_for(
            task,
            trainer,
            choice.selected,
            window,
            num_steps=choice.num_steps,
            last_share=choice.last_share,
        )
        trained = trainer.train(model, train_spec)
        cost = prices.step(choice.selected, window)
        update = update_of(
            task,
            model,
            trainer,
            train_spec,
            trained,
            cost,
            window,
            probe=probe,
            over_budget=not choice.in_budget,
        )
        return update, memory

    def _choose(
        self, task: Task, model: Tensors, window: Window, trainer: Trainer, prices: Prices
    ) -> tuple[Choice, StepCost]:
        """What to train, and what the probe for that cost."""
        if not memory_budget.fits(trainer.spec, trainer.profile, window, task.memory_bytes):
            return choose_in_memory(task, window, trainer, prices, self.fits_steps), FREE
        if self.train_all_that_fits:
            whole_model = choose_whole(prices, window, self.fits_steps)
            if whole_model is not None:
                return whole_model, FREE
        importance = local(trainer.probe(model, window, task.work, task.seed))
        probe = prices.probe(window)
        in_budget = self.probe_in_budget or prices.whole_round
        probe_seconds = probe.total(self.budget_scope) if in_budget else 0.0
        return choose(prices, window, importance, self.dp, probe_seconds, self.fits_steps), probe

    def fold(self, spec: ModelSpec) -> Fold:
        return MeanFold(spec, self.weighting, self.damping)


def output_side(task: Task, trainer: Trainer) -> Window:
    """All blocks or, where memory is too small for that, as many as fit on the output side: at least one."""
    spec, last = trainer.spec, trainer.spec.num_blocks
    for end in range(1, last):
        if memory_budget.fits(spec, trainer.profile, Window(end, last), task.memory_bytes):
            return Window(end, last)
    return Window(last, last)
