"""Runs, clients and rounds as the JSON that the page and scripts read. ``docs/api.md`` explains every field."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from fedel.records import RoundRecord
from fedel.types import ModelSpec
from fedel_coordinator.run_view import ClientView, RunView

Json = dict[str, Any]
_LONG = ("clients", "tensor_clients", "tensor_untrained_rounds")


def summary(view: RunView) -> Json:
    """A run in a list."""
    return {
        "run": view.run,
        "strategy": view.config["strategy"]["name"],
        "phase": view.phase,
        "message": view.message,
        "rounds_closed": view.rounds_closed,
        "num_rounds": view.num_rounds,
        "best_accuracy": view.best_accuracy,
        "best_version": view.best_version,
        "created_at": view.created_at,
    }


def head(view: RunView, now: float) -> Json:
    """A run without its clients."""
    open_round = view.open_round
    opened: Json | None = None
    if open_round is not None:
        opened = {
            "round": open_round.round_num,
            "phase": open_round.phase,
            "opened_at": open_round.opened_at,
            "deadline_seconds": open_round.deadline_seconds,
            "num_tasks": open_round.num_tasks,
            "num_done": open_round.num_done,
            "num_lost": open_round.num_lost,
        }
    return summary(view) | {
        "budget_seconds": view.budget_seconds,
        "open_round": opened,
        "stops_after_round": view.stops_after_round,
        "now": now,
    }


def setting(view: RunView, spec: ModelSpec) -> Json:
    """What does not change during a run: its configuration, its blocks and its tensors."""
    return {
        "config": view.config,
        "model": spec.name,
        "model_bytes": spec.num_bytes,
        "blocks": list(spec.block_names),
        "tensors": [{"name": t.name, "block": t.block} for t in spec.weights],
    }


def client(view: ClientView) -> Json:
    """Without its silence, which every heartbeat changes."""
    shown: Json = msgspec.to_builtins(view)
    del shown["silent_seconds"], shown["rounds_held"]
    return shown


def brief(record: RoundRecord, tensors: Sequence[str]) -> Json:
    """A closed round without its clients."""
    short = {key: value for key, value in msgspec.to_builtins(record).items() if key not in _LONG}
    if record.client_tests is not None:
        short["client_tests"] = {k: v for k, v in short["client_tests"].items() if k != "clients"}
    deviations = record.deviations()
    short["deviation"] = (
        {"min": min(deviations), "median": statistics.median(deviations), "max": max(deviations)}
        if deviations
        else None
    )
    short["tensor_clients"] = [record.tensor_clients.get(name, 0) for name in tensors]
    return short
