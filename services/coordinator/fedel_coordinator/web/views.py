"""Runs, clients and rounds as the JSON that the page and scripts read. ``docs/api.md`` explains every field."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedel_coordinator.members import Member
from fedel_coordinator.run import STOPPING, Run
from fedel_coordinator.saved import spec_from_text
from fedel_coordinator.status import ROUND_PHASES
from fedel_coordinator.store import ClientRow, RunRow

Json = dict[str, Any]
_LONG = ("clients", "tensor_clients", "tensor_untrained_rounds")


def summary(run: Run | RunRow) -> Json:
    """A run in a list."""
    row = run.row if isinstance(run, Run) else run
    config = json.loads(row.config_json)
    return {
        "run": row.name,
        "strategy": config["strategy"]["name"],
        "phase": run.phase,
        "message": (run.notice or run.message) if isinstance(run, Run) else row.message,
        "rounds_closed": run.state.round_num if isinstance(run, Run) else row.model_version,
        "num_rounds": config["rounds"]["num_rounds"],
        "best_accuracy": run.best_accuracy,
        "created_at": row.created_at,
    }


def live(run: Run) -> Json:
    """A run that this process drives, without its clients."""
    now = run.round
    budgets = [task.budget_seconds for task in now.plan.tasks] if now else []
    opened: Json | None = None
    if now is not None:
        opened = {
            "round": now.round_num,
            "phase": ROUND_PHASES[now.status],
            "opened_at": now.opened_at,
            "deadline_seconds": now.plan.deadline_seconds,
            "num_tasks": len(now.tasks),
            "num_done": len(now.done),
            "num_lost": len(now.lost),
        }
    return summary(run) | {
        "budget_seconds": budgets[0] if budgets else run.last_record.get("budget_seconds", 0.0),
        "open_round": opened,
        "stops_after_round": run.phase == STOPPING,
        "now": run.tools.clock(),
    }


def stored(row: RunRow, now: float) -> Json:
    """A run that ended before this process began."""
    return summary(row) | {"budget_seconds": 0.0, "open_round": None, "stops_after_round": False, "now": now}


def setting(run: Run | RunRow) -> Json:
    """What does not change while a run goes on: its configuration, its blocks and its tensors."""
    row = run.row if isinstance(run, Run) else run
    spec = run.spec if isinstance(run, Run) else spec_from_text(row.spec_json)
    return {
        "config": json.loads(row.config_json),
        "model": spec.name,
        "model_bytes": spec.num_bytes,
        "blocks": list(spec.block_names),
        "tensors": [{"name": t.name, "block": t.block} for t in spec.weights],
    }


def clients(run: Run) -> dict[str, Json]:
    """Every client of a live run, by name."""
    entries = {entry["client"]: entry for entry in run.last_record.get("clients", ())}
    return {m.row.client: _client(run, m, entries.get(m.row.client)) for m in run.members}


def seen(run: Run) -> dict[str, float]:
    """When each client was last heard, in whole Unix seconds."""
    now, fleet = run.tools.clock(), run.tools.fleet
    return {m.row.client: round(now - fleet.silent_for(m.row.client)) for m in run.members}


def stored_clients(rows: Sequence[ClientRow], record: Mapping[str, Any]) -> dict[str, Json]:
    """Every client of a run that is over, as its last round saw them."""
    entries = {entry["client"]: entry for entry in record.get("clients", ())}
    away = {"connected": False, "present": False, "phase": "idle"}
    return {
        row.client: {"client": row.client, "device_type": row.device_type, "num_samples": row.num_samples}
        | away
        | _figures(entries.get(row.client))
        for row in rows
    }


def _client(run: Run, member: Member, entry: Mapping[str, Any] | None) -> Json:
    """What the client told in the open round, or else what stands in the last record."""
    row, fleet = member.row, run.tools.fleet
    figures = _figures(entry)
    if member.window.front_block:
        window = member.window
        figures["window"] = [window.end_block, window.front_block]
        figures["resets"] = max(window.resets, figures["resets"])
    if member.budget_seconds:
        figures |= {
            "train_seconds": member.train_seconds,
            "budget_seconds": member.budget_seconds,
            "deviation": member.train_seconds / member.budget_seconds - 1,
            "bytes_up": member.bytes_up,
            "bytes_down": member.bytes_down,
        }
    return {
        "client": row.client,
        "device_type": row.device_type,
        "num_samples": row.num_samples,
        "connected": fleet.ready(row.client, run.name),
        "present": not row.has_left and fleet.present(row.client),
        "phase": member.phase,
    } | figures


def _figures(entry: Mapping[str, Any] | None) -> Json:
    if entry is None:
        entry = {}
    return {
        "window": entry.get("window"),
        "resets": entry.get("resets", 0),
        "train_seconds": entry.get("train_seconds"),
        "budget_seconds": entry.get("budget_seconds"),
        "deviation": entry.get("deviation"),
        "bytes_up": entry.get("bytes_up", 0),
        "bytes_down": entry.get("bytes_down", 0),
    }


def brief(record: Mapping[str, Any], tensors: Sequence[str]) -> Json:
    """A closed round without its clients."""
    short = {key: value for key, value in record.items() if key not in _LONG}
    deviations = [e["deviation"] for e in record["clients"] if e["deviation"] is not None]
    trained = record.get("tensor_clients", {})
    short["deviation"] = (
        {"min": min(deviations), "median": statistics.median(deviations), "max": max(deviations)}
        if deviations
        else None
    )
    short["tensor_clients"] = [trained.get(name, 0) for name in tensors]
    return short
