"""The numbers of a report: as they are for scripts, and as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedel.client_tests import Spread
from fedel.report import curves
from fedel.report.runs import StoredRun
from fedel.report.words import number, percent


@dataclass(frozen=True)
class RunFigures:
    """One run in numbers. Shares are fractions: an accuracy of 0.5 is 50 %. ``None``: not measured."""

    run: str
    strategy: str
    phase: str
    rounds: int
    """Closed rounds."""
    num_clients: int
    seed: int | None
    accuracy: float | None
    """Of the last test."""
    smoothed_accuracy: float | None
    """Mean of the last tests."""
    best_accuracy: float | None
    """Of a single test."""
    test_loss: float | None
    num_classes: int | None
    at_chance: bool
    """The last tests are no better than guessing."""
    seconds: float
    """Of all rounds, on the run's own clock."""
    seconds_per_round: float | None
    virtual: bool
    """The seconds are those of a simulation."""
    scope: str
    """What T_th counts, and the seconds of a simulation."""
    mean_deviation: float | None
    bytes_up: int
    bytes_down: int
    num_tasks: int
    num_updates: int
    num_refused: int
    """Updates that were refused or never came."""
    epsilon: float | None
    clients: Spread | None
    """The last test on clients' own data."""
    device_types: Mapping[str, Spread]
    """The same by type of device."""


def figures(run: StoredRun) -> RunFigures:
    rounds, result = run.rounds, run.result
    accuracies = [accuracy for _, _, accuracy in run.accuracies()]
    losses = [record.test_loss for record in rounds if record.test_loss is not None]
    deviations = run.deviations()
    own = next((record.client_tests for record in reversed(rounds) if record.client_tests), None)
    seed = run.settings.get("seed", result.seed if result else None)
    return RunFigures(
        run=run.name,
        strategy=run.strategy,
        phase=run.phase,
        rounds=len(rounds),
        num_clients=run.num_clients,
        seed=seed if isinstance(seed, int) else None,
        accuracy=accuracies[-1] if accuracies else None,
        smoothed_accuracy=run.means()[-1] if accuracies else None,
        best_accuracy=max(accuracies, default=None),
        test_loss=losses[-1] if losses else None,
        num_classes=run.num_classes,
        at_chance=run.is_at_chance,
        seconds=sum(record.latency_seconds for record in rounds),
        seconds_per_round=run.mean_latency(),
        virtual=run.is_virtual,
        scope=run.scope,
        mean_deviation=sum(deviations) / len(deviations) if deviations else None,
        bytes_up=sum(record.bytes_up for record in rounds),
        bytes_down=sum(record.bytes_down for record in rounds),
        num_tasks=sum(record.num_tasks for record in rounds),
        num_updates=sum(record.num_updates for record in rounds),
        num_refused=sum(len({*record.refused, *record.dropped}) for record in rounds),
        epsilon=rounds[-1].epsilon if rounds else None,
        clients=own.overall if own else None,
        device_types=own.by_device_type if own else {},
    )


@dataclass(frozen=True)
class Column:
    head: str
    means: str
    """For the note below the table; empty if the head says it all."""
    cell: Callable[[RunFigures], str]
    optional: bool = False
    """Left out where no run has a value."""


_COLUMNS = (
    Column("rounds", "", lambda f: str(f.rounds)),
    Column("accuracy", f"mean of the last {curves.IN_A_ROW} tests", lambda f: percent(f.smoothed_accuracy)),
    Column("last", "the last test alone", lambda f: percent(f.accuracy)),
    Column("best", "the best single test", lambda f: percent(f.best_accuracy)),
    Column("s/round", "mean seconds per round", lambda f: number(f.seconds_per_round, 3)),
    Column("seconds", "of all rounds", lambda f: number(f.seconds, 1 if f.seconds >= 10 else 2)),
    Column(
        "vs. T_th",
        "time of a client that counts, compared with its budget, as a mean",
        lambda f: percent(f.mean_deviation, signed=True),
    ),
    Column("MB up", "of all clients and rounds", lambda f: number(_megabytes(f.bytes_up), 1)),
    Column("down", "megabytes", lambda f: number(_megabytes(f.bytes_down), 1)),
    Column(
        "lost",
        "updates that did not count, of all tasks",
        lambda f: f"{f.num_refused}/{f.num_tasks}" if f.num_refused else "-",
        optional=True,
    ),
    Column(
        "epsilon",
        "privacy that a client in every round has spent",
        lambda f: number(f.epsilon, 2),
        optional=True,
    ),
)


def _megabytes(num_bytes: int) -> float | None:
    """None of a number that cannot be true: a damaged file may have one of hundreds of digits."""
    return num_bytes / 1e6 if abs(num_bytes) < 10**300 else None


@dataclass(frozen=True)
class TextTable:
    heads: list[str]
    rows: list[list[str]]
    """One per run."""
    note: str
    """What the columns mean."""


def table(runs: Sequence[StoredRun]) -> TextTable:
    """The comparison table. Heads say when seconds are virtual."""
    found = [figures(run) for run in runs]
    shown = [
        column for column in _COLUMNS if not column.optional or any(column.cell(each) != "-" for each in found)
    ]
    virtual = "virtual " if found and all(each.virtual for each in found) else ""
    heads = {"s/round": f"{virtual}s/round", "seconds": f"{virtual}s"}
    return TextTable(
        heads=["method", *(heads.get(column.head, column.head) for column in shown)],
        rows=[
            [label, *(column.cell(each) for column in shown)]
            for label, each in zip(labels(runs), found, strict=True)
        ],
        note="; ".join(f"{heads.get(c.head, c.head)}: {c.means}" for c in shown if c.means) + ".",
    )


def labels(runs: Sequence[StoredRun]) -> list[str]:
    """A name for each run: its method; with the name of the run where two have the same method."""
    methods = [run.method for run in runs]
    return [run.method if methods.count(run.method) == 1 else f"{run.method} ({run.name})" for run in runs]
