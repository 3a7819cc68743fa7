"""What the first rounds of a job would be on a fleet: planned and fitted as in a run, but nothing is trained.

The same code as in a run decides everything; only the trainer is one that trains nothing. It finds every tensor
of a window equally important, so a method that chooses tensors inside a window may choose others in the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedel.core.compression import sent_bytes
from fedel.core.memory_budget import step_bytes
from fedel.core.steps import effective_steps
from fedel.roles.planner import Handover, RoundPlanner
from fedel.roles.run_state import Member
from fedel.roles.speed import believed
from fedel.strategies.base import needed_by
from fedel.types import (
    ClientView,
    LocalWork,
    Memory,
    ModelSpec,
    Report,
    Role,
    Speed,
    Task,
    Tensors,
    TimingProfile,
    Trained,
    TrainSpec,
    Window,
)


@dataclass(frozen=True)
class ClientForecast:
    """One client's first round; seconds of transfers are ``None`` where its link was never measured."""

    client: str
    device_type: str
    windows: tuple[Window | None, ...]
    """Of the first rounds in which it has a task."""
    num_steps: int = 0
    train_seconds: float = 0.0
    """Steps and probe."""
    download_seconds: float | None = None
    upload_seconds: float | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    memory_bytes: int | None = None
    """Most that a step has in use; ``None`` where the device's profile does not say it."""
    memory_limit_bytes: int | None = None
    over_budget: bool = False
    """Even the smallest useful piece of work takes longer than T_th."""
    num_rounds: int = 1
    """Times T_th that its task takes."""

    @property
    def seconds(self) -> float:
        return self.train_seconds + (self.download_seconds or 0.0) + (self.upload_seconds or 0.0)


@dataclass(frozen=True)
class Forecast:
    budget_seconds: float
    """T_th of one step."""
    scope: str
    """What counts against T_th."""
    deadline_seconds: float
    clients: tuple[ClientForecast, ...]
    """Those with a task in the first round, and then the others."""


@dataclass
class _DryTrainer:
    """The Trainer port without training: remembers what would be trained and sent."""

    spec: ModelSpec
    profile: TimingProfile
    num_samples: int
    classes: tuple[int, ...] = ()
    same_inputs: bool = False
    asked: TrainSpec | None = field(default=None)

    def profile_again(self) -> bool:
        return False

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:  # noqa: ARG002
        return {t.name: -1.0 for t in self.spec.weights_in(window.end, window.front)}

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:  # noqa: ARG002
        self.asked = train_spec
        steps, last_share = train_spec.num_steps, train_spec.last_share
        return Trained({}, steps, effective_steps(steps, train_spec.work), 0.0, last_share=last_share)

    def bytes_up(self, task: Task) -> int:
        asked = self.asked
        assert asked is not None
        last = max(asked.exits)
        total = 0.0
        for t in self.spec.tensors:
            is_head = t.role is Role.EXIT and t.block in asked.exits
            is_statistic = t.role is Role.BUFFER and asked.end <= t.block <= last
            if t.name in asked.selected or is_head or is_statistic:
                total += sent_bytes(task.upload, t) * asked.width ** min(2, len(t.shape))
        return round(total)

    def memory_bytes(self) -> int | None:
        asked, use = self.asked, self.profile.memory
        assert asked is not None
        if use is None:
            return None
        return step_bytes(self.spec, use, asked.selected, Window(asked.end, max(asked.exits)))


def forecast(
    planner: RoundPlanner, members: Sequence[Member], links: Mapping[str, Speed], num_rounds: int = 3
) -> Forecast:
    """The first ``num_rounds`` rounds. ``links`` are what is known of the clients' links from earlier runs."""
    zero = np.zeros((), np.float32)
    model: dict[str, Any] = {t.name: np.broadcast_to(zero, t.shape) for t in planner.spec.tensors}
    handover, memories = Handover(), dict[str, Memory]()
    found = {member.client: ClientForecast(member.client, member.device_type, ()) for member in members}
    first = None
    for _ in range(num_rounds):
        views = {view.name: view for view in believed(members, {})}
        plan = planner.plan(handover, list(views.values()))
        first = first or plan
        reports: list[Report] = []
        for task in plan.tasks:
            view, memory = views[task.client], memories.get(task.client, Memory())
            trainer = _DryTrainer(planner.spec, view.profile, view.num_samples)
            needed = needed_by(planner.strategy, task, memory, trainer)
            update, memories[task.client] = planner.strategy.fit(task, model, memory, trainer)
            reports.append(update.report)
            before = found[task.client]
            if not before.windows:
                link = links.get(task.client, Speed())
                before = _first_round(before, planner, task, view, trainer, update.report, needed, link)
            found[task.client] = replace(before, windows=(*before.windows, update.report.window))
        handover = handover.after(plan, reports, {})
    assert first is not None
    planned = {task.client for task in first.tasks}
    return Forecast(
        budget_seconds=planner.budget_seconds(believed(members, {})),
        scope=planner.scope,
        deadline_seconds=first.deadline_seconds,
        clients=tuple(sorted(found.values(), key=lambda c: (c.client not in planned, c.client))),
    )


def _first_round(
    client: ClientForecast,
    planner: RoundPlanner,
    task: Task,
    view: ClientView,
    trainer: _DryTrainer,
    report: Report,
    needed: frozenset[str],
    link: Speed,
) -> ClientForecast:
    down = sum(planner.spec.by_name[name].num_bytes for name in needed)
    up = trainer.bytes_up(task)
    use = view.profile.memory
    return replace(
        client,
        num_steps=report.num_steps,
        train_seconds=report.seconds("train"),
        download_seconds=down / link.down_rate if link.down_rate else None,
        upload_seconds=up / link.up_rate if link.up_rate else None,
        bytes_down=down,
        bytes_up=up,
        memory_bytes=trainer.memory_bytes(),
        memory_limit_bytes=use.limit_bytes or None if use else None,
        over_budget=report.over_budget,
        num_rounds=task.num_rounds,
    )
