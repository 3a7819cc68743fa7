"""A run as CSV, for other programs: one row per round."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedel.records import RoundRecord
from fedel.report.runs import StoredRun

_COLUMNS: Mapping[str, Callable[[RoundRecord], object]] = {
    "accuracy": lambda r: r.accuracy,
    "test_loss": lambda r: r.test_loss,
    "train_loss": lambda r: r.loss,
    "round_seconds": lambda r: r.latency_seconds,
    "budget_seconds": lambda r: r.budget_seconds,
    "num_tasks": lambda r: r.num_tasks,
    "num_updates": lambda r: r.num_updates,
    "num_late": lambda r: r.num_late,
    "num_refused": lambda r: len({*r.refused, *r.dropped}),
    "mean_deviation": lambda r: sum(r.deviations()) / len(r.deviations()) if r.deviations() else None,
    "bytes_up": lambda r: r.bytes_up,
    "bytes_down": lambda r: r.bytes_down,
    "o1": lambda r: r.o1,
    "epsilon": lambda r: r.epsilon,
    "clients_mean_accuracy": lambda r: r.own.mean_accuracy if r.own else None,
    "clients_weighted_accuracy": lambda r: r.own.weighted_accuracy if r.own else None,
    "clients_worst_accuracy": lambda r: r.own.worst_accuracy if r.own else None,
    "clients_deviation": lambda r: r.own.deviation if r.own else None,
}
COLUMNS = ("run", "strategy", "seed", "round", "seconds", "virtual", "scope", *_COLUMNS)
"""``round`` counts from 1; ``seconds`` is the time from the start to the end of the round."""


def write_csv(runs: Sequence[StoredRun], directory: Path) -> list[Path]:
    """One file per run. What was not measured is empty."""
    directory.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for run in runs:
        files.append(_free(directory / f"{run.name}.csv", files))
        with files[-1].open("w", newline="", encoding="utf-8") as stream:
            lines = csv.writer(stream, lineterminator="\n")
            lines.writerow(COLUMNS)
            lines.writerows(rows(run))
    return files


def rows(run: StoredRun) -> list[list[object]]:
    """One per round, with the values of ``COLUMNS``; ``None`` is not measured."""
    return [
        [
            *(run.name, run.strategy, run.settings.get("seed", ""), record.round + 1, seconds),
            *(int(run.is_virtual), record.scope),
            *(cell(record) for cell in _COLUMNS.values()),
        ]
        for record, seconds in zip(run.rounds, run.seconds(), strict=True)
    ]


def _free(file: Path, taken: Sequence[Path]) -> Path:
    """Runs of different directories may have the same name."""
    number = sum(other.stem == file.stem or other.stem.startswith(f"{file.stem}-again-") for other in taken)
    return file.with_stem(f"{file.stem}-again-{number}") if number else file
