"""What the model is worth on data that each client holds and does not train on: a table of the last test."""

from __future__ import annotations

from collections.abc import Sequence

from fedel.client_tests import Spread
from fedel.report.figures import labels
from fedel.report.runs import StoredRun
from fedel.report.words import percent

HEADS = ("method", "round", "device type", "clients", "mean", "weighted", "worst", "worst client", "deviation")
NOTE = (
    "The newest model that clients tested on samples of their own, which they do not train on. Mean: every"
    " client counts the same; weighted: every sample does. Deviation: over clients."
)


def rows(runs: Sequence[StoredRun]) -> list[list[str]]:
    """For each run all its clients, then each type of device."""
    found: list[list[str]] = []
    for label, run in zip(labels(runs), runs, strict=True):
        record = next((record for record in reversed(run.rounds) if record.client_tests), None)
        if record is None or record.client_tests is None:
            continue
        tests, number = record.client_tests, str(record.round + 1)
        found.append([label, number, "all", *_cells(tests.overall)])
        if len(tests.by_device_type) > 1:
            found += [
                [label, number, kind or "unknown", *_cells(s)] for kind, s in tests.by_device_type.items()
            ]
    return found


def _cells(spread: Spread) -> list[str]:
    return [
        str(spread.num_clients),
        percent(spread.mean_accuracy),
        percent(spread.weighted_accuracy),
        percent(spread.worst_accuracy),
        spread.worst_client,
        percent(spread.deviation),
    ]
