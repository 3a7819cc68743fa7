"""TimelyFL (Zhang et al., 2023): a round closes after an interval and work is cut to fit it (algorithms 9).

The interval is the time the k-th fastest participant needs for the whole model. Faster clients do more epochs,
slower ones train as many blocks on the output side as they can in the time. Late updates are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedel.core.budgeted import window_cost
from fedel.core.timing import SLACK, fits
from fedel.strategies.base import (
    WEIGHTINGS,
    MeanFold,
    Method,
    check_damping,
    check_scope,
    draw,
    one_of,
    task_for,
    train_spec_for,
    update_of,
    whole,
    whole_step,
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


@dataclass(frozen=True)
class TimelyFL(Method):
    name: ClassVar[str] = "timelyfl"

    share: float = 0.5
    """Share of the participants that can train the whole model within the interval."""
    slack: float = 0.1
    """How much longer than the interval the round stays open, as a share of it."""
    budget_scope: str = "backward"
    """What counts as time: ``backward``, as in the paper's simulation, or ``train``, the whole step, which
    real devices need: the round closes on their clock."""
    comm_seconds: float = 0.0
    """Seconds to send the whole model; part of the model takes its share of them."""
    weighting: str = "uniform"
    """How much a client counts in the masked mean: ``uniform`` or ``samples``."""
    damping: float = 0.0
    """How much less a value moves the fewer clients trained it: ``share ** damping`` of the way to their mean,
    where share is their part of the round's clients, by weight. 0: all the way, as in the paper."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share:g}: the share of participants lies above 0 and up to 1")
        if self.slack < 0 or self.comm_seconds < 0:
            raise ValueError(
                f"slack = {self.slack:g}, comm_seconds = {self.comm_seconds:g}: neither goes below 0"
            )
        check_scope(self.budget_scope)
        one_of("weighting", self.weighting, WEIGHTINGS)
        check_damping(self.damping)

    def plan(self, context: RoundContext) -> Plan:
        clients = draw(context)
        if not clients:
            return Plan(())
        steps = [context.work.steps_for(client.num_samples) for client in clients]
        seconds = [
            num * whole_step(context.spec, client.profile).total(self.budget_scope)
            for num, client in zip(steps, clients, strict=True)
        ]
        interval = interval_of([t + self.comm_seconds for t in seconds], self.share)
        tasks = []
        for client, num, compute in zip(clients, steps, seconds, strict=True):
            epochs, alpha = workload(interval, compute, self.comm_seconds)
            settings = {"interval": interval, "alpha": alpha, "epochs": float(epochs)}
            tasks.append(task_for(context, client, settings, num_steps=num * epochs))
        return Plan(tuple(tasks), close_after_seconds=interval * (1 + self.slack))

    def tensors_needed(self, task: Task, memory: Memory, trainer: Trainer) -> Collection[str] | None:  # noqa: ARG002
        """All but the early exits, unless every block trains through its own."""
        return trainer.spec.tensors_for(trainer.spec.exits_for(1, trainer.spec.num_blocks))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        spec, alpha = trainer.spec, task.settings["alpha"]
        steps = task.work.steps_for(trainer.num_samples)
        window, cost, in_time = whole(spec), whole_step(spec, trainer.profile), True
        if alpha < 1:
            room = (task.settings["interval"] - alpha * self.comm_seconds) / steps
            window, cost, in_time = longest_suffix(trainer, room, self.budget_scope)
        selected = {t.name for t in spec.weights_in(window.end, window.front)}
        train_spec = train_spec_for(task, trainer, selected, window)
        trained = trainer.train(model, train_spec)
        return update_of(
            task, model, trainer, train_spec, trained, cost, window, over_budget=not in_time
        ), memory

    def fold(self, spec: ModelSpec) -> Fold:
        return MeanFold(spec, self.weighting, self.damping)


def interval_of(seconds: Sequence[float], share: float) -> float:
    """T_k: the time within which a ``share`` of the clients are done.

    >>> interval_of([10, 20, 30, 40], share=0.5)
    20
    """
    return sorted(seconds)[max(1, math.ceil(len(seconds) * share - SLACK)) - 1]


def workload(interval: float, compute_seconds: float, comm_seconds: float = 0.0) -> tuple[int, float]:
    """Epochs E of the whole model in the interval and, where not even one fits, the share alpha that does.

    >>> workload(20, 10), workload(20, 20), workload(20, 40)
    ((2, 1.0), (1, 1.0), (1, 0.5))
    """
    if compute_seconds <= 0:
        return 1, 1.0
    epochs = max(1, math.floor((interval - comm_seconds) / compute_seconds * (1 + SLACK)))
    return epochs, min(1.0, interval / (compute_seconds + comm_seconds))


def longest_suffix(trainer: Trainer, room_seconds: float, scope: str) -> tuple[Window, StepCost, bool]:
    """The most blocks on the output side that train within the room, their cost, and whether they do fit.

    The frozen input side still runs forward, which is why less than a share alpha of the model may fit.
    """
    spec, last = trainer.spec, trainer.spec.num_blocks
    for end in range(1, last + 1):
        window = Window(end, last)
        cost = window_cost(spec, trainer.profile, {t.name for t in spec.weights_in(end, last)}, window)
        in_time = fits(cost.total(scope), room_seconds)
        if in_time:
            break
    return window, cost, in_time
