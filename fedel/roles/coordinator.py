"""The coordinator's part of a round: plan it, say when it may close, and write down what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedel.core import timing
from fedel.core.bias import o1
from fedel.job import RunConfig
from fedel.strategies import build
from fedel.strategies.base import DEVICE_CLOCK, clock_of
from fedel.types import ClientView, Memory, ModelSpec, Plan, Report, RoundContext, Task


@dataclass(frozen=True)
class RunState:
    """Everything that one round hands to the next; JSON throughout, so that a restart loses nothing."""

    round_num: int = 0
    plan_state: Mapping[str, Any] = field(default_factory=dict)
    global_importance: Mapping[str, float] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)
    """Each client's report of the last round it counted in."""


class Director:
    """Plans and closes the rounds of one run."""

    def __init__(self, run: RunConfig, spec: ModelSpec, default_clock: str = DEVICE_CLOCK) -> None:
        self.run = run
        self.spec = spec
        self.strategy = build(run.strategy)
        self.scope = clock_of(self.strategy, default_clock)

    def plan(self, state: RunState, clients: Sequence[ClientView]) -> Plan:
        """The round's tasks. ``clients`` are those that are there, in a fixed order."""
        rounds = self.run.rounds
        wanted = math.ceil(rounds.num_participants * rounds.over_select)
        plan = self.strategy.plan(
            RoundContext(
                round_num=state.round_num,
                seed=self.run.seed,
                spec=self.spec,
                clients=[replace(c, last=state.reports.get(c.name)) for c in clients],
                num_participants=wanted,
                budget_seconds=self.budget_seconds(clients),
                work=replace(self.run.work, lr=self.run.work.lr * rounds.lr_decay**state.round_num),
                global_importance=state.global_importance,
                state=state.plan_state,
            )
        )
        return replace(plan, deadline_seconds=self._deadline_seconds(plan, clients))

    def budget_seconds(self, clients: Sequence[ClientView]) -> float:
        """T_th of one step."""
        budget = self.run.budget
        return timing.budget(
            [c.profile for c in clients], budget.policy, budget.value, self.scope, self.spec.exit_each
        )

    def _deadline_seconds(self, plan: Plan, clients: Sequence[ClientView]) -> float:
        """When the round may close although some clients are not back."""
        rounds = self.run.rounds
        if plan.close_after_seconds is not None:
            return max(plan.close_after_seconds, rounds.deadline_floor_seconds)
        num_samples = {client.name: client.num_samples for client in clients}
        seconds = (t.budget_seconds * t.work.steps_for(num_samples[t.client]) for t in plan.tasks)
        return max(rounds.deadline_factor * max(seconds, default=0.0), rounds.deadline_floor_seconds)

    def enough(self, num_reports: int, num_tasks: int) -> bool:
        """Whether a round need not wait for anybody else."""
        wanted = self.run.rounds.num_participants or num_tasks
        return num_reports >= min(wanted, num_tasks)

    def close(
        self, state: RunState, plan: Plan, reports: Sequence[Report], global_importance: Mapping[str, float]
    ) -> RunState:
        """The state that the next round starts from."""
        counted = {report.client: report for report in reports}
        return RunState(state.round_num + 1, plan.state, dict(global_importance), {**state.reports, **counted})

    def record(self, state: RunState, plan: Plan, reports: Sequence[Report]) -> dict[str, Any]:
        """One line of ``rounds.jsonl``, to which the caller adds its clocks and bytes."""
        tasks = {task.client: task for task in plan.tasks}
        return {
            "round": state.round_num,
            "strategy": self.strategy.name,
            "budget_seconds": plan.tasks[0].budget_seconds if plan.tasks else 0.0,
            "num_tasks": len(plan.tasks),
            "num_updates": len(reports),
            "loss": _mean([r.loss for r in reports]),
            "o1": o1([set(r.selected) for r in reports], [t.name for t in self.spec.weights]),
            "clients": [self._client(tasks[r.client], r) for r in sorted(reports, key=lambda r: r.client)],
        }

    def _client(self, task: Task, report: Report) -> dict[str, Any]:
        budget = task.budget_seconds * max(1, report.num_steps)
        predicted = report.cost.total(self.scope) * report.num_steps
        return {
            "client": report.client,
            "window": [report.window.end, report.window.front] if report.window else None,
            "resets": report.resets,
            "num_selected": len(report.selected),
            "selected": list(report.selected),
            "num_steps": report.num_steps,
            "num_samples": report.num_samples,
            "loss": report.loss,
            "budget_seconds": budget,
            "predicted_seconds": predicted,
            "predicted_forward_seconds": report.cost.forward_seconds * report.num_steps,
            "predicted_backward_seconds": report.cost.backward_seconds * report.num_steps,
            "train_seconds": report.train_seconds,
            "deviation": report.train_seconds / budget - 1 if report.train_seconds and budget else None,
            "predicted_deviation": predicted / budget - 1 if budget else None,
            "over_budget": report.over_budget,
            "peak_memory_bytes": report.peak_memory_bytes,
        }


def memory_of(report: Report | None) -> Memory:
    """What the coordinator can give back to a client that lost its own memory."""
    if report is None:
        return Memory()
    return Memory(report.window, report.selected, report.resets, report.rounds_held)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
