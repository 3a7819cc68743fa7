"""FedEL (Zhang et al., 2025): the same time budget for everyone, spent inside a sliding window of blocks.

Line numbers are those of the paper's Algorithm 1. Lines 8 to 10 come after line 11 here: importance needs an
exit at the window's front, and is only needed inside the window (A11).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedel.core.budgeted import SELECTIONS, choose, less_probe, probe_cost, window_cost
from fedel.core.importance import blend, local
from fedel.core.timing import block_seconds, fits
from fedel.core.window import VARIANTS, slide
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
)
from fedel.types import (
    FREE,
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
class FedEL(Method):
    name: ClassVar[str] = "fedel"

    beta: float = 0.6
    """Share of local importance in the blend; the rest is the global model's last change."""
    budget_scope: str = "backward"
    """What counts against T_th: ``backward``, as in the paper's simulation, or ``train``, the whole step."""
    variant: str = "fedel"
    """Window: ``fedel``; ``disjoint`` is the paper's FedEL-C; ``no-rollback`` never starts again."""
    hold_rounds: int = 10
    """Rounds each window is held in the variant ``no-rollback``."""
    dp: str = "exact"
    """Tensor selection: ``exact``, or ``official`` for ElasticTrainer's own dynamic programme."""
    weighting: str = "uniform"
    """How much a client counts in the masked mean: ``uniform`` or ``samples``."""
    train_all_that_fits: bool = False
    """Where the whole window fits the budget, train it whole; importance is not needed, nor its probe."""
    probe_in_budget: bool = False
    """Take the importance probe's time out of T_th; otherwise it comes on top, as in the paper."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta = {self.beta:g}: the share of local importance lies between 0 and 1")
        if self.hold_rounds < 1:
            raise ValueError(f"hold_rounds = {self.hold_rounds}: a window is held for at least 1 round")
        check_scope(self.budget_scope)
        one_of("variant", self.variant, VARIANTS)
        one_of("dp", self.dp, SELECTIONS)
        one_of("weighting", self.weighting, WEIGHTINGS)

    def plan(self, context: RoundContext) -> Plan:
        return Plan(tuple(task_for(context, client) for client in draw(context)))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        memory = self.slide(task, memory, trainer)  # line 11
        spec, profile, scope = trainer.spec, trainer.profile, self.budget_scope
        window, budget = memory.window, task.budget_seconds
        assert window is not None
        everything = {t.name for t in spec.weights_in(window.end, window.front)}
        whole_window = window_cost(spec, profile, everything, window).total(scope)
        if self.train_all_that_fits and fits(whole_window, budget):
            selected, in_budget, probe = everything, True, FREE
        else:
            probed = local(trainer.probe(model, window, task.work, task.seed))  # line 8
            importance = blend(probed, task.global_importance, self.beta)  # lines 9 and 10
            probe = probe_cost(spec, profile, window)
            if self.probe_in_budget:
                steps = task.work.steps_for(trainer.num_samples)
                budget = less_probe(budget, probe.total(scope), steps)
            selected, in_budget = choose(spec, profile, window, importance, budget, scope, self.dp)  # line 12
        train_spec = train_spec_for(task, trainer, selected, window)
        trained = trainer.train(model, train_spec)  # line 13
        update = update_of(
            task,
            model,
            trainer,
            train_spec,
            trained,
            window_cost(spec, profile, selected, window),
            window,
            probe=probe,
            resets=memory.resets,
            rounds_held=memory.rounds_held,
            over_budget=not in_budget,
        )
        return update, replace(memory, selected=update.report.selected)

    def slide(self, task: Task, memory: Memory, trainer: Trainer) -> Memory:
        """The memory with this round's window; it is kept only if the update that follows is accepted."""
        held = memory.rounds_held + 1
        if self.variant == "no-rollback" and memory.window is not None and held < self.hold_rounds:
            return replace(memory, rounds_held=held)
        blocks = {trainer.spec.by_name[name].block for name in memory.selected}
        # Tensors can be left out of the backward pass, blocks cannot be left out of the forward pass: where
        # that counts, a window just above the budget would spend it all on the way in.
        within = self.budget_scope == "train"
        budget = task.budget_seconds - (trainer.profile.overhead_seconds if within else 0.0)
        seconds = block_seconds(trainer.profile, self.budget_scope)
        window = slide(memory.window, blocks, seconds, budget, self.variant, within)
        was_last = memory.window is not None and memory.window.front == trainer.spec.num_blocks
        reset = was_last and self.variant != "no-rollback"
        return replace(memory, window=window, resets=memory.resets + reset, rounds_held=0)

    def fold(self, spec: ModelSpec) -> Fold:
        return MeanFold(spec, self.weighting)  # line 15
