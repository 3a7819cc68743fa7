"""Rounds of a method on the fake fleet of ``fedel.testing``, which is exported from here too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedel.core.importance import global_change
from fedel.core.timing import budget
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
    Memory,
    Plan,
    Report,
    RoundContext,
    Strategy,
    Tensors,
    Trained,
    Trainer,
    TrainSpec,
    Update,
)

__all__ = [
    "BLOCKS",
    "NUM_CLASSES",
    "WORK",
    "FakeTrainer",
    "History",
    "Recorder",
    "context_of",
    "fleet",
    "frozen_spec",
    "initial_model",
    "profile",
    "run_rounds",
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


@dataclass(frozen=True)
class History:
    """What came of a run."""

    model: Tensors
    models: tuple[Tensors, ...]
    """The model at the start of each round."""
    plans: tuple[Plan, ...]
    updates: tuple[tuple[Update, ...], ...]
    memories: Mapping[str, Memory]
    budget_seconds: float

    @property
    def reports(self) -> list[Report]:
        return [update.report for updates in self.updates for update in updates]


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
        budget_seconds or budget([c.profile for c in clients.values()], scope="backward"),
        work,
        state=state or {},
    )


def run_rounds(
    strategy: Strategy,
    num_rounds: int = 5,
    clients: Mapping[str, Trainer] | None = None,
    *,
    seed: int = 1,
    num_participants: int = 0,
    work: LocalWork = WORK,
    budget_seconds: float = 0.0,
    scope: str = "backward",
    backwards: bool = False,
) -> History:
    """Plan, fit, fold, round by round; the plan's state goes through JSON, as it does in a service.

    ``budget_seconds`` of 0 takes the fastest client's; ``backwards`` folds the updates last one first.
    """
    clients = clients or fleet()
    of = next(iter(clients.values())).spec
    budget_seconds = budget_seconds or budget([c.profile for c in clients.values()], scope=scope)
    model: Tensors = initial_model(of)
    state: Tensors = {}
    plan_state: dict[str, Any] = {}
    change: dict[str, float] = {}
    memories = dict.fromkeys(clients, Memory())
    last: dict[str, Report] = {}
    models, plans, rounds = [], [], []
    for round_num in range(num_rounds):
        context = context_of(clients, round_num, seed, num_participants, budget_seconds, work, plan_state, last)
        plan = strategy.plan(replace(context, global_importance=change))
        plan_state = json.loads(json.dumps(plan.state, allow_nan=False))
        updates = []
        for task in plan.tasks:
            update, memory = strategy.fit(task, model, memories[task.client], clients[task.client])
            seconds = update.report.cost.total(scope) * update.report.num_steps
            if plan.close_after_seconds is None or seconds <= plan.close_after_seconds:
                memories[task.client], last[task.client] = memory, update.report
                updates.append(update)
        fold = strategy.fold(of)
        for update in reversed(updates) if backwards else updates:
            fold.add(update)
        folded = fold.finish(model, state)
        change = global_change(folded.model, model)
        models.append(model)
        plans.append(plan)
        rounds.append(tuple(updates))
        model, state = folded.model, folded.state
    return History(model, tuple(models), tuple(plans), tuple(rounds), memories, budget_seconds)


def same_bits(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(one[n].tobytes() == other[n].tobytes() for n in one)
