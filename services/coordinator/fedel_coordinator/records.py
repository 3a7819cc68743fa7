"""What is written down of rounds and runs: the lines of ``rounds.jsonl``, and ``result.json``."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedel import __version__
from fedel.roles.coordinator import Director, RunState
from fedel.types import Plan, Report, Task
from fedel_coordinator.shards import Committed
from fedel_coordinator.store import ReportRow, RunRow

DEVICE_PHASES = ("download", "train", "upload", "wait")


@dataclass(frozen=True)
class Closing:
    """Everything that the record of a committed round is made of."""

    plan: Plan
    reports: Sequence[Report]
    late_tasks: Mapping[str, Task]
    """Tasks of the round before, of clients whose late update counts in this one."""
    told: Mapping[str, ReportRow]
    """What clients told when they were done; one whose word is still on the way is missing."""
    device_types: Mapping[str, str]
    committed: Committed
    before: Mapping[str, Any]
    """The record of the round before."""
    opened_at: float
    sealed_at: float
    committed_at: float


def round_record(director: Director, state: RunState, closing: Closing) -> dict[str, Any]:
    """One line of ``rounds.jsonl``, still without the evaluation."""
    plan, committed = closing.plan, closing.committed
    known = {task.client for task in plan.tasks}
    strays = tuple(t for client, t in closing.late_tasks.items() if client not in known)
    record = director.record(state, replace(plan, tasks=plan.tasks + strays), closing.reports)
    entries = [_client_entry(entry, closing) for entry in record["clients"]]
    phases = {name: max((e["phases"].get(name, 0.0) for e in entries), default=0.0) for name in DEVICE_PHASES}
    untrained: Mapping[str, int] = closing.before.get("tensor_untrained_rounds", {})
    return record | {
        "num_tasks": len(plan.tasks),
        "num_late": sum(report.round_num < state.round_num for report in closing.reports),
        "clients": entries,
        "version": committed.version,
        "opened_at": closing.opened_at,
        "latency_seconds": closing.committed_at - closing.opened_at,
        "collect_seconds": closing.sealed_at - closing.opened_at,
        "phases": phases | {"fold": committed.fold_seconds, "commit": committed.commit_seconds},
        "bytes_up": sum(entry["bytes_up"] for entry in entries),
        "bytes_down": sum(entry["bytes_down"] for entry in entries),
        "tensor_clients": committed.num_clients,
        "tensor_untrained_rounds": {
            name: 0 if count else untrained.get(name, 0) + 1 for name, count in committed.num_clients.items()
        },
    }


def _client_entry(entry: dict[str, Any], closing: Closing) -> dict[str, Any]:
    told = closing.told.get(entry["client"])
    return entry | {
        "device_type": closing.device_types.get(entry["client"], ""),
        "bytes_up": told.bytes_up if told else 0,
        "bytes_down": told.bytes_down if told else 0,
        "phases": json.loads(told.phases_json) if told else {},
        "device": json.loads(told.device_json) if told else {},
    }


def run_result(row: RunRow, director: Director, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``result.json`` of a run that ended."""
    tested = [record for record in records if record.get("accuracy") is not None]
    best = max(tested, key=lambda record: float(record["accuracy"]), default={})
    final = tested[-1] if tested else {}
    return {
        "run": row.name,
        "phase": row.phase,
        "message": row.message,
        "strategy": director.strategy.name,
        "seed": director.run.seed,
        "rounds": len(records),
        "accuracy": final.get("accuracy"),
        "test_loss": final.get("test_loss"),
        "best_accuracy": best.get("accuracy"),
        "best_round": best.get("round"),
        "best_version": best.get("version"),
        "model_version": row.model_version,
        "wall_seconds": (row.ended_at or row.created_at) - row.created_at,
        "virtual_seconds": None,
        "bytes_up": sum(record["bytes_up"] for record in records),
        "bytes_down": sum(record["bytes_down"] for record in records),
        "clients": _deviations(records),
        "tensors": [tensor.name for tensor in director.spec.weights],
        "versions": {"fedel": __version__, "python": platform.python_version(), "numpy": np.__version__},
    }


def _deviations(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By client: training time over T_th, minus one, on the mean and at its largest."""
    seen: dict[str, list[float]] = {}
    for record in records:
        for entry in record["clients"]:
            values = seen.setdefault(entry["client"], [])
            if entry["deviation"] is not None:
                values.append(entry["deviation"])
    return {
        client: {
            "deviation_mean": sum(values) / len(values) if values else None,
            "deviation_max": max(values, key=abs, default=None),
            "rounds_measured": len(values),
        }
        for client, values in sorted(seen.items())
    }
