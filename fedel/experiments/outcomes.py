"""Finished runs, and the numbers that every experiment takes from them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedel.experiments import runner
from fedel.experiments.plans import PlannedRun
from fedel.experiments.scale import Scale
from fedel.experiments.sections import shown
from fedel.experiments.stats import (
    FAILS,
    HOLDS,
    UNDECIDED,
    UNKNOWN,
    Answer,
    Estimate,
    Factor,
    at_least,
    estimate,
    factor,
)
from fedel.records import RoundRecord
from fedel.report import runs as reports
from fedel.report.curves import smoothed

HOLD = 3
"""A target is reached at the first of this many tests in a row at which the smoothed curve holds it."""
LAST = 0.25
"""The final metric is the mean of the tests in this last share of a run, so that it does not depend on where a
run happens to stop."""
CLOCKS = {"backward": "backward pass", "train": "whole step"}
"""What virtual time counts, by budget scope, for readers."""


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
    def tests(self) -> list[float]:
        """The metric of every test."""
        return [
            self._metric(record.accuracy, record.test_loss)
            for record in self.report.rounds
            if record.accuracy is not None
        ]

    @cached_property
    def curve(self) -> list[tuple[float, float]]:
        return self.curve_on("")

    def curve_on(self, scope: str) -> list[tuple[float, float]]:
        """Virtual seconds and metric of every test; each is the mean over the tenth of the time just before it.

        ``scope`` is the clock; empty takes the run's own.
        """
        spent = itertools.accumulate(_seconds(record, scope) for record in self.report.rounds)
        tested = [s for s, record in zip(spent, self.report.rounds, strict=True) if record.tested]
        return smoothed(list(zip(tested, self.tests, strict=True)))

    def _metric(self, accuracy: float, loss: float | None) -> float:
        if not self.lower_is_better:
            return 100 * accuracy
        return math.nan if loss is None else math.exp(min(loss, 700.0))

    @property
    def final(self) -> float:
        return statistics.fmean(self.tests[-math.ceil(LAST * len(self.tests)) :])

    @property
    def last_exit(self) -> float | None:
        """Final accuracy of the last exit by itself, where exits were tested; for methods that average some."""
        rounds = self.report.rounds
        late = rounds[-math.ceil(LAST * len(rounds)) :]
        tested = [100 * r.exit_accuracies[-1] for r in late if r.exit_accuracies]
        return statistics.fmean(tested) if tested else None

    @property
    def best(self) -> float:
        """For tables only: the best of many tests grows with their number and their noise."""
        return max((value for _, value in self.curve), key=lambda value: self.sign * value)

    def seconds(self, scope: str = "") -> float:
        """Virtual seconds of the whole run, on its own clock or on another one."""
        return sum(_seconds(record, scope) for record in self.report.rounds)

    def target(self, share: float) -> float:
        """A share of its final metric; of a perplexity, where lower is better, so much above it."""
        return self.final / share if self.lower_is_better else self.final * share

    def seconds_to(self, target: float, scope: str = "") -> float:
        """Virtual seconds until the metric was as good as ``target`` and stayed so; else infinite."""
        curve = self.curve_on(scope)
        holds = [self.sign * value >= self.sign * target for _, value in curve]
        reached = (i for i in range(len(curve) - HOLD + 1) if all(holds[i : i + HOLD]))
        return next((curve[i][0] for i in reached), math.inf)

    def at(self, seconds: float, scope: str = "") -> float | None:
        """The metric at a point in virtual time."""
        curve = self.curve_on(scope)
        return next((value for s, value in reversed(curve) if s <= seconds * (1 + 1e-9)), None)


def _seconds(record: RoundRecord, scope: str) -> float:
    return record.clock_seconds[scope] if scope else record.latency_seconds


@dataclass(frozen=True)
class Race:
    """Two methods on the way to the same targets, seed by seed."""

    runs: Sequence[tuple[Outcome, Outcome, float]]
    """Ours, theirs, target."""
    scope: str

    @cached_property
    def times(self) -> list[tuple[float, float]]:
        return [(a.seconds_to(t, self.scope), b.seconds_to(t, self.scope)) for a, b, t in self.runs]

    @property
    def factor(self) -> Factor | None:
        """How many times sooner ours is; a run that never gets there counts as if it did at its end."""
        found = []
        for (ours, theirs, _), (a, b) in zip(self.runs, self.times, strict=True):
            ends = ours.seconds(self.scope), theirs.seconds(self.scope)
            found.append(min(b, ends[1]) / min(a, ends[0]))
        return factor(found) if found else None

    @property
    def sooner(self) -> Answer:
        """Whether ours is sooner. One that never got there could have, later: then only the other is known."""
        if self.factor is None:
            return UNKNOWN
        found = at_least(self.factor.logs, 0.0)
        ours, theirs = (any(t == math.inf for t in times) for times in zip(*self.times, strict=True))
        open_ended = {HOLDS: ours, FAILS: theirs}.get(found, ours or theirs)
        return Answer(UNDECIDED.kind, "runs end before they get there") if open_ended else found

    @property
    def numbers(self) -> str:
        if not self.runs:
            return ""
        ours, theirs = (sum(t < math.inf for t in times) for times in zip(*self.times, strict=True))
        total = len(self.runs)
        times = f"{shown(self.factor, 2)} times, " if ours == theirs == total else ""
        return f"{times}reached by {ours} and {theirs} of {total} runs"


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

    def shorter(self, task: str, label: str, other: str = "fedavg", scope: str = "") -> Estimate | None:
        """How many times shorter its rounds are. Says nothing about what they are worth."""

        def per_round(outcome: Outcome) -> float:
            return outcome.seconds(scope) / len(outcome.report.rounds)

        return mean(per_round(b) / per_round(a) for a, b in self.pairs(task, label, other))

    def seconds_to(self, task: str, label: str, share: float, scope: str = "") -> list[float]:
        """Seconds to a share of what FedAvg ends at with the same seed; infinite for runs that never do."""
        pairs = self.pairs(task, label, "fedavg")
        return [ours.seconds_to(fedavg.target(share), scope) for ours, fedavg in pairs]

    def race(self, task: str, label: str, other: str, share: float, scope: str = "") -> Race:
        """Two methods on the way to a share of FedAvg's final metric."""
        targets = {o.plan.seed: o.target(share) for o in self.of(task, "fedavg")}
        pairs = self.pairs(task, label, other)
        return Race([(a, b, targets[a.plan.seed]) for a, b in pairs if a.plan.seed in targets], scope)

    def at_end_of(
        self, task: str, label: str, other: str, scope: str = "", share: float = 1.0
    ) -> Estimate | None:
        """The metric when a share of the time of another method's run with the same seed has passed."""
        pairs = self.pairs(task, label, other)
        found = (ours.at(share * theirs.seconds(scope), scope) for ours, theirs in pairs)
        return mean(value for value in found if value is not None)

    def lead(
        self, task: str, label: str, other: str, scope: str = "", end_of: str = "", share: float = 1.0
    ) -> Estimate | None:
        """How much better one method is than another, per seed: points of accuracy, percent of perplexity.

        Of their final metrics; or with ``end_of`` when a share of the time of that method's run has passed.
        """
        ends = {o.plan.seed: share * o.seconds(scope) for o in self.of(task, end_of)} if end_of else {}
        gains = []
        for ours, theirs in self.pairs(task, label, other):
            if end_of and ours.plan.seed not in ends:
                continue
            a, b = ours.final, theirs.final
            if end_of:
                moment = ends[ours.plan.seed]
                here, there = ours.at(moment, scope), theirs.at(moment, scope)
                if here is None or there is None:
                    continue
                a, b = here, there
            gains.append(_gain(ours, a, b))
        return mean(gains)

    def lead_over_plateau(self, task: str, label: str, other: str, scope: str, share: float) -> Estimate | None:
        """How much better one method is, after a share of another one's time, than that one at its end."""
        gains = []
        for ours, theirs in self.pairs(task, label, other):
            here = ours.at(share * theirs.seconds(scope), scope)
            if here is not None:
                gains.append(_gain(ours, here, theirs.final))
        return mean(gains)


def _gain(outcome: Outcome, ours: float, theirs: float) -> float:
    """Points of accuracy; percent of perplexity."""
    gain = outcome.sign * (ours - theirs)
    return 100 * gain / theirs if outcome.lower_is_better else gain


def mean(values: Iterable[float]) -> Estimate | None:
    found = list(values)
    return estimate(found) if found else None


def _task_order(scale: Scale) -> Callable[[PlannedRun], int]:
    order = list(scale.tasks)
    return lambda run: order.index(run.task)
