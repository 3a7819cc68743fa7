"""Finished runs, and the numbers that every experiment takes from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedel.experiments import runner
from fedel.experiments.plans import PlannedRun
from fedel.experiments.scale import Scale
from fedel.experiments.stats import Estimate, estimate
from fedel.report import runs as reports

SMOOTH = 4
"""Accuracies are means of this many tests in a row: slow devices slide together, and single tests jump."""


@dataclass(frozen=True)
class Outcome:
    """A finished run, or the finished part of a run."""

    plan: PlannedRun
    report: reports.StoredRun
    metric: str

    @property
    def lower_is_better(self) -> bool:
        return self.metric == "perplexity"

    @property
    def sign(self) -> int:
        return -1 if self.lower_is_better else 1

    @cached_property
    def curve(self) -> list[tuple[float, float]]:
        """Virtual seconds and metric of every test; each is the mean of the test and those just before it."""
        tests = [
            (seconds, self._metric(record.accuracy, record.test_loss))
            for record, seconds in zip(self.report.rounds, self.report.seconds(), strict=True)
            if record.accuracy is not None
        ]
        values = [value for _, value in tests]
        return [
            (seconds, statistics.fmean(values[max(0, i + 1 - SMOOTH) : i + 1]))
            for i, (seconds, _) in enumerate(tests)
        ]

    def _metric(self, accuracy: float, loss: float | None) -> float:
        if not self.lower_is_better:
            return 100 * accuracy
        return math.nan if loss is None else math.exp(min(loss, 700.0))

    @property
    def final(self) -> float:
        return self.curve[-1][1]

    @property
    def best(self) -> float:
        return max((value for _, value in self.curve), key=lambda value: self.sign * value)

    def seconds(self, scope: str = "") -> float:
        """Virtual seconds of the whole run, on its own clock or on another one."""
        rounds = self.report.rounds
        return sum(r.clock_seconds[scope] if scope else r.latency_seconds for r in rounds)

    def seconds_to(self, target: float) -> float:
        """Virtual seconds until the metric was as good as ``target``; infinite if it never was."""
        reached = (seconds for seconds, value in self.curve if self.sign * value >= self.sign * target)
        return next(reached, math.inf)

    def at(self, seconds: float) -> float | None:
        """The metric at a point in virtual time."""
        return next((value for s, value in reversed(self.curve) if s <= seconds * (1 + 1e-9)), None)


class Outcomes:
    """The existing runs of one experiment."""

    def __init__(self, scale: Scale, runs: Sequence[PlannedRun], place: Path) -> None:
        self.scale = scale
        self.found: list[Outcome] = []
        self.missing: list[PlannedRun] = []
        for run in runs:
            if runner.state(run, place) == runner.DONE:
                self.found.append(Outcome(run, reports.load(place / run.name), scale.tasks[run.task].metric))
            else:
                self.missing.append(run)
        self.tasks = list(dict.fromkeys(run.task for run in sorted(runs, key=_task_order(scale))))

    def of(self, task: str, label: str) -> list[Outcome]:
        """The runs of a method, one per seed."""
        found = [o for o in self.found if (o.plan.task, o.plan.label) == (task, label)]
        return sorted(found, key=lambda outcome: outcome.plan.seed)

    def first(self, task: str, label: str) -> Outcome | None:
        return next(iter(self.of(task, label)), None)

    def labels(self, task: str) -> list[str]:
        return list(dict.fromkeys(o.plan.label for o in self.found if o.plan.task == task))

    def pairs(self, task: str, label: str, other: str) -> list[tuple[Outcome, Outcome]]:
        """Runs of two methods with the same seed."""
        theirs = {o.plan.seed: o for o in self.of(task, other)}
        return [(o, theirs[o.plan.seed]) for o in self.of(task, label) if o.plan.seed in theirs]

    def mean(self, task: str, label: str, figure: Callable[[Outcome], float]) -> Estimate | None:
        return mean(map(figure, self.of(task, label)))

    def speedup(self, task: str, label: str, other: str = "fedavg") -> Estimate | None:
        """How many times faster than another method in virtual time, for the same number of rounds."""
        return mean(b.seconds() / a.seconds() for a, b in self.pairs(task, label, other))


def mean(values: Iterable[float]) -> Estimate | None:
    found = list(values)
    return estimate(found) if found else None


def _task_order(scale: Scale) -> Callable[[PlannedRun], int]:
    order = list(scale.tasks)
    return lambda run: order.index(run.task)
