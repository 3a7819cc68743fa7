"""Makes the record of a round from what was planned, reported and committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedel import privacy
from fedel.core.bias import o1
from fedel.records import DEVICE_PHASES, ClientRecord, RoundRecord
from fedel.roles.events import Committed
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_state import OpenRound, RunState, TaskResult
from fedel.types import Report, Task


def round_record(planner: RoundPlanner, state: RunState, committed: Committed, now: float) -> RoundRecord:
    """The record of the open round, complete but for the test of its model."""
    open_round = state.open
    assert open_round is not None, "only an open round is committed"
    reports = open_round.reports
    clients = tuple(
        _client_record(planner, state, open_round, report)
        for report in sorted(reports, key=lambda report: report.client)
    )
    in_time = [client for client in clients if not client.staleness]
    phases = {name: max((c.phases.get(name, 0.0) for c in in_time), default=0.0) for name in DEVICE_PHASES}
    plan, num_clients = open_round.plan, committed.num_clients
    return RoundRecord(
        round=open_round.round_num,
        strategy=planner.strategy.name,
        budget_seconds=plan.tasks[0].budget_seconds / plan.tasks[0].num_rounds,
        num_tasks=len(plan.tasks),
        num_updates=len(reports),
        loss=_mean([report.loss for report in reports]),
        o1=o1([set(r.selected) for r in reports], [t.name for t in planner.spec.weights]),
        clients=clients,
        num_late=sum(report.round_num < open_round.round_num for report in reports),
        version=committed.version,
        opened_at=open_round.opened_at,
        latency_seconds=_seconds_between(open_round.opened_at, now),
        collect_seconds=_seconds_between(open_round.opened_at, min(open_round.sealed_at, now)),
        phases=phases | {"fold": committed.fold_seconds, "commit": committed.commit_seconds},
        bytes_up=sum(client.bytes_up for client in clients),
        bytes_down=sum(client.bytes_down for client in clients),
        tensor_clients=num_clients,
        tensor_untrained_rounds=untrained_rounds(state.untrained_rounds, num_clients),
        scope=planner.scope,
        deadline_seconds=plan.deadline_seconds,
        refused=dict(open_round.lost),
        epsilon=privacy.epsilon(planner.run.protection, open_round.round_num + 1),
    )


def bare_record(
    planner: RoundPlanner, state: RunState, committed: Committed, now: float, trouble: str
) -> RoundRecord:
    """The least that is known about a round whose record cannot be made."""
    open_round = state.open
    assert open_round is not None, "only an open round is committed"
    return RoundRecord(
        round=open_round.round_num,
        strategy=planner.strategy.name,
        budget_seconds=0.0,
        num_tasks=len(open_round.plan.tasks),
        num_updates=len(open_round.reports),
        loss=None,
        o1=0.0,
        clients=(),
        version=committed.version,
        opened_at=open_round.opened_at,
        latency_seconds=_seconds_between(open_round.opened_at, now),
        tensor_untrained_rounds=untrained_rounds(state.untrained_rounds, committed.num_clients),
        deadline_seconds=open_round.plan.deadline_seconds,
        trouble=trouble,
    )


def untrained_rounds(before: Mapping[str, int], num_clients: Mapping[str, int]) -> dict[str, int]:
    """Rounds since each tensor was last trained.

    >>> untrained_rounds({"a": 2, "b": 0}, {"a": 1, "b": 0})
    {'a': 0, 'b': 1}
    """
    return {name: 0 if count else before.get(name, 0) + 1 for name, count in num_clients.items()}


def _client_record(
    planner: RoundPlanner, state: RunState, open_round: OpenRound, report: Report
) -> ClientRecord:
    client, staleness = report.client, open_round.round_num - report.round_num
    tasks, results = open_round.tasks, open_round.results
    if staleness:
        tasks, results = state.handover.at_work, state.late_results
    member, result = state.members.get(client), results.get(client) or TaskResult(report)
    device_type = member.device_type if member else ""
    record = client_record(planner.scope, report, tasks.get(client), result, device_type)
    return replace(record, staleness=staleness)


def counted_seconds(scope: str, train_seconds: float, phases: Mapping[str, float]) -> float:
    """Measured seconds that count against T_th; 0 where nothing ran on a clock.

    In scope ``round`` that is the time from the task's arrival to the end of its upload, without waiting for
    others.
    """
    if scope != "round" or not train_seconds:
        return train_seconds
    transfers = phases.get("download", 0.0) + phases.get("upload", 0.0)
    return transfers + phases.get("train", train_seconds)


def client_record(
    scope: str, report: Report, task: Task | None, result: TaskResult, device_type: str
) -> ClientRecord:
    """One client's part of a round."""
    budget = task.round_seconds(report.num_samples) if task else 0.0
    predicted = report.cost.total(scope) * report.batches
    measured = counted_seconds(scope, report.train_seconds, result.phases)
    if scope == "round" and measured:
        predicted += report.probe.total(scope) + measured - report.train_seconds
    return ClientRecord(
        client=report.client,
        window=(report.window.end, report.window.front) if report.window else None,
        resets=report.resets,
        num_selected=len(report.selected),
        selected=report.selected,
        num_steps=report.num_steps,
        num_samples=report.num_samples,
        loss=report.loss,
        budget_seconds=budget,
        predicted_seconds=predicted,
        predicted_forward_seconds=report.cost.forward_seconds * report.batches,
        predicted_backward_seconds=report.cost.backward_seconds * report.batches,
        train_seconds=report.train_seconds,
        deviation=measured / budget - 1 if measured and budget else None,
        predicted_deviation=predicted / budget - 1 if budget else None,
        over_budget=report.over_budget,
        peak_memory_bytes=report.peak_memory_bytes,
        device_type=device_type,
        bytes_up=result.bytes_up,
        bytes_down=result.bytes_down,
        phases=_phases(result),
        device=result.device,
        slowness=task.speed.slowness if task else 1.0,
        last_share=report.last_share,
    )


def _phases(result: TaskResult) -> Mapping[str, float]:
    """What the client measured; the probe, which it measures as a part of the training, by itself."""
    phases, probe = result.phases, result.report.probe_seconds
    if "train" not in phases:
        return phases
    return {**phases, "probe": probe, "train": max(0.0, phases["train"] - probe)}


def _seconds_between(begin: float, end: float) -> float:
    """Not below 0: ``begin`` may come from before a restart, when the machine's clock was set differently."""
    return max(0.0, end - begin)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
