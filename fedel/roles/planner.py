"""Plans a round: T_th, who trains what, the deadline, and how many updates are enough."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedel import privacy
from fedel.core import timing
from fedel.core.timing import SLACK
from fedel.job import RunConfig
from fedel.roles.gate import MAX_COUNT
from fedel.strategies import build, protection
from fedel.strategies.base import DEVICE_CLOCK, clock_of
from fedel.types import (
    ClientView,
    Memory,
    ModelSpec,
    Participant,
    Plan,
    Report,
    RoundContext,
    Strategy,
    Task,
)


@dataclass(frozen=True)
class Handover:
    """What one round hands to the next."""

    round_num: int = 0
    plan_state: Mapping[str, Any] = field(default_factory=dict)
    global_importance: Mapping[str, float] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)
    """Each client's report of the last round it counted in."""

    def accepted_round(self, client: str) -> int:
        """The last round in which the client counted; -1 if it never did."""
        report = self.reports.get(client)
        return report.round_num if report else -1

    def memory(self, client: str) -> Memory:
        """The coordinator's copy of a client's memory, for a device that lost its own."""
        return memory_of(self.reports.get(client))

    def after(self, plan: Plan, reports: Sequence[Report], importance: Mapping[str, float]) -> Handover:
        """What the next round starts from."""
        counted = {report.client: report for report in reports}
        return Handover(self.round_num + 1, plan.state, importance, {**self.reports, **counted})


class RoundPlanner:
    """Plans the rounds of one run."""

    def __init__(
        self,
        run: RunConfig,
        spec: ModelSpec,
        default_clock: str = DEVICE_CLOCK,
        strategy: Strategy | None = None,
    ) -> None:
        """``default_clock`` is the budget scope of a method that has none; ``strategy`` replaces the run's."""
        self.run = run
        self.spec = spec
        self.strategy = strategy or build(run.strategy)
        protection.check(self.strategy, spec, run.protection)
        privacy.check_installed(run.protection)
        self.scope = clock_of(self.strategy, default_clock)

    def plan(self, handover: Handover, clients: Sequence[ClientView]) -> Plan:
        """The round's tasks. ``clients`` are those that are present, in a fixed order."""
        rounds = self.run.rounds
        plan = self.strategy.plan(
            RoundContext(
                round_num=handover.round_num,
                seed=self.run.seed,
                spec=self.spec,
                clients=[replace(c, last=handover.reports.get(c.name)) for c in clients],
                num_participants=math.ceil(rounds.num_participants * rounds.over_select),
                budget_seconds=self.budget_seconds(clients),
                work=replace(self.run.work, lr=self.run.work.lr * rounds.lr_decay**handover.round_num),
                global_importance=handover.global_importance,
                state=handover.plan_state,
            )
        )
        return replace(
            plan,
            tasks=tuple(_sendable(task) for task in plan.tasks),
            deadline_seconds=self._deadline_seconds(plan, clients),
            # As a restart would read it, so that a run goes on the same way with and without one.
            state=json.loads(json.dumps(plan.state)),
        )

    def budget_seconds(self, clients: Sequence[ClientView]) -> float:
        """T_th of one step."""
        budget, profiles = self.run.budget, [client.profile for client in clients]
        return timing.budget(profiles, budget.policy, budget.value, self.scope, self.spec.exit_each)

    def _deadline_seconds(self, plan: Plan, clients: Sequence[ClientView]) -> float:
        """Seconds after which the round may close although some clients are not back."""
        rounds = self.run.rounds
        wanted = plan.close_after_seconds
        if wanted is None:
            num_samples = {client.name: client.num_samples for client in clients}
            seconds = (t.budget_seconds * t.work.steps_for(num_samples[t.client]) for t in plan.tasks)
            wanted = rounds.deadline_factor * max(seconds, default=0.0)
        return min(max(wanted, rounds.deadline_floor_seconds), rounds.max_deadline_seconds)

    def participant(self, task: Task, num_samples: int) -> Participant:
        """What a client with this task may send; ``num_samples`` is what it joined with."""
        max_steps = min(task.work.steps_for(num_samples), MAX_COUNT)
        # A step counts 1 + m + m^2 + ... through the momentum, and once more with a proximal term.
        each = 1 + (1 / (1 - task.work.momentum) if task.work.momentum < 1 else max_steps)
        return Participant(
            client=task.client,
            round_num=task.round_num,
            num_samples=min(num_samples, self.run.rounds.max_samples),
            max_steps=max_steps,
            max_effective_steps=max_steps * each * (1 + SLACK),
        )

    def enough(self, num_reports: int, num_tasks: int) -> bool:
        """Whether a round does not have to wait for anyone else."""
        wanted = self.run.rounds.num_participants or num_tasks
        return num_reports >= min(wanted, num_tasks)

    def evaluation_due(self, round_num: int) -> bool:
        """Whether the model that this round makes is tested; the last one always is."""
        rounds = self.run.rounds
        every, done = rounds.evaluate_every, round_num + 1
        return every > 0 and (done == rounds.num_rounds or done % every == 0)


def _sendable(task: Task) -> Task:
    """Whatever number of steps a method came to, it can be sent."""
    if task.work.num_steps <= MAX_COUNT:
        return task
    return replace(task, work=replace(task.work, num_steps=MAX_COUNT))


def memory_of(report: Report | None) -> Memory:
    """What a report says about its client's memory."""
    if report is None:
        return Memory()
    return Memory(report.window, report.selected, report.resets, report.rounds_held)
