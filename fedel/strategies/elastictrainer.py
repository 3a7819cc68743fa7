"""ElasticTrainer (Huang et al., 2023) in a federation: the best tensors of the whole model within the budget.

The forward pass always runs through the whole network and local importance alone decides, so a slow device
keeps training the tensors near the output (paper, section 3). Re-selected every round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedel.core.importance import local
from fedel.core.selection import select
from fedel.core.selection_official import select_official
from fedel.core.timing import SLACK, independent_updates, step_cost
from fedel.strategies.base import (
    WEIGHTINGS,
    MeanFold,
    check_scope,
    draw,
    job_for,
    one_of,
    order,
    update_of,
    whole,
)
from fedel.types import (
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

SELECTIONS = ("exact", "official")


@dataclass(frozen=True)
class ElasticTrainer:
    name: ClassVar[str] = "elastictrainer"
    evaluation: ClassVar[str] = "final"

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
        return Plan(tuple(order(context, client) for client in draw(context)))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        window = whole(trainer.spec)
        importance = local(trainer.probe(model, window, task.work, task.seed))
        probe = probe_cost(trainer, window)
        budget = step_budget(task, trainer, probe, self.budget_scope, self.probe_in_budget)
        selected, fits = choose(trainer, window, importance, budget, self.budget_scope, self.dp)
        job = job_for(task, trainer, selected, window)
        trained = trainer.train(model, job)
        cost = window_cost(trainer, selected, window)
        update = update_of(
            task,
            model,
            trainer,
            job,
            trained,
            cost,
            window,
            probe=probe,
            over_budget=not fits,
        )
        return update, memory

    def fold(self, spec: ModelSpec) -> Fold:
        return MeanFold(spec, self.weighting)


def window_cost(trainer: Trainer, selected: Collection[str], window: Window) -> StepCost:
    """Seconds of one step that trains ``selected`` inside ``window`` on this client's device."""
    spec = trainer.spec
    return step_cost(
        trainer.profile, selected, spec.exits_for(window.end, window.front), window.end, spec.exit_each
    )


def probe_cost(trainer: Trainer, window: Window) -> StepCost:
    """Seconds of the importance probe: two passes, forward and backward, over every tensor of the window."""
    once = window_cost(trainer, {t.name for t in trainer.spec.weights_in(window.end, window.front)}, window)
    return StepCost(2 * once.forward_seconds, 2 * once.backward_seconds)


def step_budget(task: Task, trainer: Trainer, probe: StepCost, scope: str, probe_in_budget: bool) -> float:
    """What one step may take: T_th, or less where the round's probe is to come out of it too.

    Half of it is kept for training: with few steps the probe would take all.
    """
    if not probe_in_budget:
        return task.budget_seconds
    share = probe.total(scope) / task.work.steps_for(trainer.num_samples)
    return task.budget_seconds - min(share, task.budget_seconds / 2)


def choose(
    trainer: Trainer,
    window: Window,
    importance: Mapping[str, float],
    budget_seconds: float,
    scope: str,
    dp: str,
) -> tuple[set[str], bool]:
    """The window's best tensors within the budget, and whether the step does fit it (A3, A21).

    Never empty-handed: if importance favours nothing, the cheapest tensor of the front block that fits is
    trained. If nothing fits, the step is over budget: where the forward pass alone fills it, the front block
    is trained all the same, since that adds little to what is spent already and nothing else would come of
    it; otherwise the front's exit alone.
    """
    times = [trainer.profile.by_name[t.name] for t in trainer.spec.weights_in(window.end, window.front)]
    fixed = window_cost(trainer, (), window).total(scope)
    room = budget_seconds * (1 + SLACK) - fixed
    grads = [t.grad_seconds for t in times]
    updates = [t.update_seconds for t in times]
    if trainer.spec.exit_each:
        grads, updates = [0.0] * len(times), independent_updates(times)
    method = select if dp == "exact" else select_official
    chosen = method(grads, updates, [importance[t.name] for t in times], room) if room > 0 else []
    selected = {t.name for t, taken in zip(times, chosen, strict=False) if taken}
    if selected:
        return selected, window_cost(trainer, selected, window).total(scope) <= budget_seconds * (1 + 1e-6)
    at_front = [t.name for t in times if t.block == window.front]
    cheapest = min(at_front, key=lambda name: window_cost(trainer, {name}, window).total(scope))
    if window_cost(trainer, {cheapest}, window).total(scope) <= budget_seconds * (1 + SLACK):
        return {cheapest}, True
    # At the last block the classifier is the exit: there is no other head to train in its place.
    own_head = window.front == trainer.spec.num_blocks or trainer.spec.exit_each
    forward_fills_it = scope == "train" and room <= 0
    return ({*at_front} if own_head or forward_fills_it else set()), False
