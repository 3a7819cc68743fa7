"""Plans a round: T_th, who trains what, the deadline, and how many updates are enough."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedel import privacy
from fedel.core import timing
from fedel.core.budgeted import MAX_FILL, Prices, least_seconds
from fedel.core.compression import sent_bytes
from fedel.core.timing import SLACK
from fedel.job import RunConfig
from fedel.roles.gate import MAX_COUNT
from fedel.strategies import build, protection
from fedel.strategies.base import DEVICE_CLOCK, clock_of
from fedel.types import (
    AS_PROFILED,
    CLOCK_PACE,
    PLAN_PACE,
    ClientView,
    Memory,
    ModelSpec,
    Participant,
    Plan,
    Report,
    RoundContext,
    Speed,
    Strategy,
    Task,
)

MIN_DEADLINE = 5.0
"""Least seconds of a deadline that follows from measured seconds: for the odd pause of a system or a link."""


@dataclass(frozen=True)
class Handover:
    """What one round hands to the next."""

    round_num: int = 0
    plan_state: Mapping[str, Any] = field(default_factory=dict)
    global_importance: Mapping[str, float] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)
    """Each client's report of the last round it counted in."""
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    """What was learned of each client's speed, where the run keeps its pace by the clock."""
    seconds: float = 0.0
    """What all rounds before took."""
    at_work: Mapping[str, Task] = field(default_factory=dict)
    """By client: tasks of earlier rounds whose updates have not come and would still count."""

    def accepted_round(self, client: str) -> int:
        """The last round in which the client counted; -1 if it never did."""
        report = self.reports.get(client)
        return report.round_num if report else -1

    def memory(self, client: str) -> Memory:
        """The coordinator's copy of a client's memory, for a device that lost its own."""
        return memory_of(self.reports.get(client))

    def after(
        self,
        plan: Plan,
        reports: Sequence[Report],
        importance: Mapping[str, float],
        speeds: Mapping[str, Speed] | None = None,
        seconds: float = 0.0,
        at_work: Mapping[str, Task] | None = None,
    ) -> Handover:
        """What the next round starts from; ``speeds`` are what this one taught, ``seconds`` what it took."""
        counted = {report.client: report for report in reports}
        return Handover(
            round_num=self.round_num + 1,
            plan_state=plan.state,
            global_importance=importance,
            reports={**self.reports, **counted},
            speeds={**self.speeds, **(speeds or {})},
            seconds=self.seconds + seconds,
            at_work=at_work or {},
        )


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
        by_clock = run.budget.pace == CLOCK_PACE and self.scope != "backward"
        self.pace = CLOCK_PACE if by_clock else PLAN_PACE
        self._bytes_up = sum(sent_bytes(run.upload, t) for t in spec.tensors)

    def plan(self, handover: Handover, clients: Sequence[ClientView], busy: Collection[str] = ()) -> Plan:
        """The round's tasks. ``clients`` are those that are present, in a fixed order; T_th follows from all of
        them, and those that are ``busy`` get no task."""
        rounds, views = self.run.rounds, {client.name: client for client in clients}
        plan = self.strategy.plan(
            RoundContext(
                round_num=handover.round_num,
                seed=self.run.seed,
                spec=self.spec,
                clients=[replace(c, last=handover.reports.get(c.name)) for c in clients if c.name not in busy],
                num_participants=math.ceil(rounds.num_participants * rounds.over_select),
                budget_seconds=self.budget_seconds(clients),
                work=replace(self.run.work, lr=self.run.work.lr * rounds.lr_decay**handover.round_num),
                global_importance=handover.global_importance,
                state=handover.plan_state,
                num_rounds=rounds.num_rounds,
            )
        )
        return replace(
            plan,
            tasks=tuple(self._complete(task, views[task.client]) for task in plan.tasks),
            deadline_seconds=self._deadline_seconds(plan, clients),
            # As a restart would read it, so that a run goes on the same way with and without one.
            state=json.loads(json.dumps(plan.state)),
        )

    def budget_seconds(self, clients: Sequence[ClientView]) -> float:
        """T_th of one step."""
        budget, seconds = self.run.budget, [self._whole_step_seconds(client) for client in clients]
        return timing.budget(seconds, budget.policy, budget.value)

    def _whole_step_seconds(self, client: ClientView) -> float:
        """A step of the whole model; in scope ``round`` with its share of the transfers of the whole model."""
        step = timing.full_step(client.profile, self.spec.exit_each).total(self.scope)
        if self.scope != "round":
            return step
        return step + self._transfer_seconds(client) / self.run.work.steps_for(client.num_samples)

    def _complete(self, task: Task, client: ClientView) -> Task:
        """The task with what no method decides; whatever number of steps a method came to, it can be sent."""
        work = replace(task.work, num_steps=min(task.work.num_steps, MAX_COUNT))
        task = replace(task, work=work, pace=self.pace, speed=client.speed, upload=self.run.upload)
        num_rounds = self._num_rounds(task, client)
        return replace(task, num_rounds=num_rounds, budget_seconds=num_rounds * task.budget_seconds)

    def _num_rounds(self, task: Task, client: ClientView) -> int:
        """How many times T_th the least takes that the client can do; 1 if that would be too late to count."""
        if self.run.rounds.staleness.max_rounds < 2:
            return 1
        prices = Prices.on(task, self.spec, client.profile, client.num_samples, self.scope)
        if self.strategy.fits_steps:
            seconds = least_seconds(prices)
        elif not self.strategy.budget_scope:
            step = timing.full_step(client.profile, self.spec.exit_each).total(self.scope)
            seconds = prices.num_steps * step + self._transfer_seconds(client)
        else:
            return 1
        num_rounds = math.ceil(seconds / prices.round_seconds * (1 - SLACK)) if prices.round_seconds else 1
        return max(1, num_rounds) if num_rounds <= self.run.rounds.staleness.max_rounds else 1

    def _deadline_seconds(self, plan: Plan, clients: Sequence[ClientView]) -> float:
        """Seconds after which the round may close although some clients are not back.

        As soon as every client was measured, it follows from measured seconds.
        """
        rounds, views = self.run.rounds, {client.name: client for client in clients}
        if plan.close_after_seconds is not None:
            wanted = plan.close_after_seconds
        else:
            seconds = (self._expected_seconds(task, views[task.client]) for task in plan.tasks)
            wanted = rounds.deadline_factor * max(seconds, default=0.0)
        measured = all(views[task.client].speed != AS_PROFILED for task in plan.tasks)
        floor = MIN_DEADLINE if measured and self.pace == CLOCK_PACE else rounds.deadline_floor_seconds
        return min(max(wanted, floor), rounds.max_deadline_seconds)

    def _expected_seconds(self, task: Task, client: ClientView) -> float:
        seconds = task.round_seconds(client.num_samples) / task.num_rounds + client.speed.wait_seconds
        if self.scope == "round":
            return seconds
        return seconds + self._transfer_seconds(client)

    def _transfer_seconds(self, client: ClientView) -> float:
        """Of the whole model, down and up."""
        return client.speed.transfer_seconds(self.spec.num_bytes, self._bytes_up)

    def participant(self, task: Task, num_samples: int) -> Participant:
        """What a client with this task may send; ``num_samples`` is what it joined with."""
        most = MAX_FILL if self.strategy.fits_steps else 1
        max_steps = min(most * task.work.steps_for(num_samples), MAX_COUNT)
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

    def is_over(self, handover: Handover) -> bool:
        """Whether the run has had all its rounds, or all its time."""
        rounds = self.run.rounds
        out_of_time = 0 < rounds.max_seconds <= handover.seconds
        return handover.round_num >= rounds.num_rounds or out_of_time

    def evaluation_due(self, round_num: int, is_last: bool) -> bool:
        """Whether the model that this round made is tested; the run's last one always is."""
        return _is_due(self.run.rounds.evaluate_every, round_num, is_last)

    def own_tests_due(self, round_num: int, is_last: bool) -> bool:
        """The same for tests on the clients' own data."""
        return _is_due(self.run.rounds.evaluate_clients_every, round_num, is_last)


def _is_due(every: int, round_num: int, is_last: bool) -> bool:
    return every > 0 and (is_last or (round_num + 1) % every == 0)


def memory_of(report: Report | None) -> Memory:
    """What a report says about its client's memory."""
    if report is None:
        return Memory()
    return Memory(report.window, report.selected, report.resets, report.rounds_held)
