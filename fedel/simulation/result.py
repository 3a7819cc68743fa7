"""``result.json``: what a run came to, from the rounds that were written down."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedel import __version__
from fedel.core.timing import SCOPES
from fedel.roles.coordinator import Director

Record = Mapping[str, Any]


def run_result(
    name: str, director: Director, records: Sequence[Record], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of a federation's result; seconds on the virtual clock besides those on the wall."""
    tested = [record for record in records if record["accuracy"] is not None]
    final: Record = tested[-1] if tested else {}
    best: Record = max(tested, key=lambda record: float(record["accuracy"]), default={})
    return {
        "run": name,
        "phase": "finished",
        "strategy": director.strategy.name,
        "seed": director.run.seed,
        "rounds": len(records),
        "accuracy": final.get("accuracy"),
        "test_loss": final.get("test_loss"),
        "best_accuracy": best.get("accuracy"),
        "best_test_loss": min((record["test_loss"] for record in tested), default=None),
        "best_round": best.get("round"),
        "scope": director.scope,
        "virtual_seconds": _sum(records, "latency_seconds"),
        "clock_seconds": {s: sum(record["clock_seconds"][s] for record in records) for s in SCOPES},
        "wall_seconds": _sum(records, "wall_seconds"),
        "bytes_up": _sum(records, "bytes_up"),
        "bytes_down": _sum(records, "bytes_down"),
        "clients": _deviations(records),
        "tensors": [tensor.name for tensor in director.spec.weights],
        "versions": _versions(),
        **facts,
    }


def _sum(records: Sequence[Record], key: str) -> Any:
    return sum(record[key] for record in records)


def _deviations(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By client: virtual training time over T_th, minus one, on the mean and at its largest."""
    seen: dict[str, list[float]] = {}
    kinds: dict[str, str] = {}
    for entry in (entry for record in records for entry in record["clients"]):
        kinds[entry["client"]] = entry["device_type"]
        if entry["deviation"] is not None:
            seen.setdefault(entry["client"], []).append(entry["deviation"])
    return {
        client: {
            "device_type": kinds[client],
            "deviation_mean": sum(values) / len(values),
            "deviation_max": max(values, key=abs),
            "rounds_measured": len(values),
        }
        for client, values in sorted(seen.items())
    }


def _versions() -> dict[str, str]:
    return {
        "fedel": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": importlib.metadata.version("torch"),
    }
