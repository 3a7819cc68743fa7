"""Methods on one job, each with the same seeds: what they come to at equal time and after equal rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedel.experiments.plans import PlannedRun, effective
from fedel.experiments.sections import shown
from fedel.experiments.stats import HOLDS as YES
from fedel.experiments.stats import Estimate, Paired, at_least, at_most, estimate, paired
from fedel.report import curves
from fedel.report.runs import StoredRun
from fedel.report.words import clock, duration, plural, same_clock

Methods = Mapping[str, Sequence[StoredRun]]
"""The runs of each method, one per seed; the same seeds in the same order."""


@dataclass(frozen=True)
class MethodFigures:
    """One method, over its seeds. Accuracies are shares: 0.5 is 50 %. ``None``: not known."""

    method: str
    strategy: str
    """As a job names it."""
    seeds: tuple[int, ...]
    same_time: Estimate | None
    """Accuracy when the shortest run of the same seed ends: the mean over the last quarter of that time."""
    same_rounds: Estimate | None
    """Accuracy after as many rounds as all methods have with the same seed: the mean of the last 4 tests."""
    lead_same_time: Paired | None
    """How much better it is than the first method, with the same seeds."""
    lead_same_rounds: Paired | None
    num_rounds: Estimate
    seconds: Estimate
    """Of all rounds, on the clock of the simulation."""
    seconds_per_round: Estimate | None
    bytes_up: Estimate
    bytes_down: Estimate
    num_at_chance: int
    """Runs whose last tests are no better than guessing."""


def plan(jobs: Mapping[str, Mapping[str, object]], task: str, seeds: Sequence[int]) -> list[PlannedRun]:
    """The runs of a comparison; first all methods with the first seed. ``jobs`` has the job of each method."""
    return [
        PlannedRun("compare", label, task, seed, effective(job, seed, task))
        for seed in seeds
        for label, job in jobs.items()
    ]


def with_equal_seeds(methods: Methods) -> dict[str, list[StoredRun]]:
    """Without methods that have no run, and without seeds that not all the others have."""
    by_seed = {label: {_seed(run): run for run in found} for label, found in methods.items() if found}
    common = sorted(set.intersection(*map(set, by_seed.values()))) if by_seed else []
    return {label: [found[seed] for seed in common] for label, found in by_seed.items()}


def figures(methods: Methods) -> list[MethodFigures]:
    """In the order of ``methods``."""
    everyone = [run for found in methods.values() for run in found]
    seeds = list(zip(*methods.values(), strict=True))
    seconds = [min(_seconds(run) for run in runs) for runs in seeds]
    rounds = [min(len(run.rounds) for run in runs) for runs in seeds]
    at_time = {
        label: [curves.late_mean(run.tests(), end) for run, end in zip(found, seconds, strict=True)]
        for label, found in methods.items()
        if same_clock(everyone)
    }
    at_rounds = {
        label: [_after(run, number) for run, number in zip(found, rounds, strict=True)]
        for label, found in methods.items()
    }
    first = next(iter(methods))
    return [
        MethodFigures(
            method=label,
            strategy=found[0].strategy,
            seeds=tuple(map(_seed, found)),
            same_time=_estimate(at_time.get(label)),
            same_rounds=_estimate(at_rounds[label]),
            lead_same_time=_lead(at_time.get(label), at_time.get(first)) if label != first else None,
            lead_same_rounds=_lead(at_rounds[label], at_rounds[first]) if label != first else None,
            num_rounds=estimate([len(run.rounds) for run in found]),
            seconds=estimate([_seconds(run) for run in found]),
            seconds_per_round=_estimate([run.mean_latency() for run in found]),
            bytes_up=estimate([sum(r.bytes_up for r in run.rounds) for run in found]),
            bytes_down=estimate([sum(r.bytes_down for r in run.rounds) for run in found]),
            num_at_chance=sum(run.is_at_chance for run in found),
        )
        for label, found in methods.items()
    ]


def sentences(methods: Methods) -> list[str]:
    """The result first, then what stands in its way."""
    found, everyone = figures(methods), [run for each in methods.values() for run in each]
    seeds = list(zip(*methods.values(), strict=True))
    said = []
    if all(each.same_time for each in found):
        end = statistics.fmean(min(_seconds(run) for run in runs) for runs in seeds)
        how = f"{duration(end)} {clock(everyone[0])}".strip()
        said.append(f"After the same time ({how}): {_each(found, 'same_time')}.")
        said += _leads(found, "lead_same_time", "after the same time")
    elif not same_clock(everyone):
        said.append(
            "The seconds of these methods are of different clocks: set `scope` in the job to compare them."
        )
    if all(each.same_rounds for each in found):
        rounds = sorted({min(len(run.rounds) for run in runs) for runs in seeds})
        number = plural(rounds[0], "round") if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds"
        said.append(f"After the same rounds ({number}): {_each(found, 'same_rounds')}.")
        said += _leads(found, "lead_same_rounds", "after the same rounds")
    for each in found:
        if each.num_at_chance:
            said.append(
                f"{each.method} has not learned with {each.num_at_chance} of {plural(len(each.seeds), 'seed')}:"
                " it is at chance."
            )
    return [*said, interval_note(len(seeds))]


def interval_note(num_seeds: int) -> str:
    if num_seeds == 1:
        return "One seed says nothing about chance: take three or more to get intervals."
    return f"± is half of a 95 % confidence interval over {num_seeds} seeds; all methods have the same seeds."


def accuracy(found: Estimate | None) -> str:
    """In percent, with its interval."""
    return "-" if found is None else f"{shown(_percent(found))} %"


def _percent(found: Estimate) -> Estimate:
    return Estimate(100 * found.mean, None if found.half is None else 100 * found.half, found.count)


def _each(found: Sequence[MethodFigures], name: str) -> str:
    return ", ".join(f"{each.method} {accuracy(getattr(each, name))}" for each in found)


def _leads(found: Sequence[MethodFigures], name: str, when: str) -> list[str]:
    """The first method against each of the others. Nothing from one seed."""
    said, first = [], found[0].method
    for each in found[1:]:
        lead: Paired | None = getattr(each, name)
        if lead is None or lead.difference.half is None:
            continue
        points = _percent(lead.difference)
        size = shown(Estimate(abs(points.mean), points.half, points.count))
        if YES in (at_most(points, 0.0), at_least(points, 0.0)) and points.mean:
            better = first if points.mean < 0 else each.method
            worse = each.method if points.mean < 0 else first
            said.append(f"{better} is better than {worse} {when}, by {size} points.")
        else:
            said.append(f"{first} and {each.method} cannot be told apart {when}: they differ by {size} points.")
    return said


def _seconds(run: StoredRun) -> float:
    return sum(record.latency_seconds for record in run.rounds)


def _seed(run: StoredRun) -> int:
    return int(run.settings.get("seed", 0))


def _after(run: StoredRun, num_rounds: int) -> float | None:
    tests = [value for number, _, value in run.accuracies() if number < num_rounds]
    return curves.in_a_row(tests)[-1] if tests else None


def _estimate(values: Sequence[float | None] | None) -> Estimate | None:
    known = [value for value in values or () if value is not None]
    return estimate(known) if known and len(known) == len(values or ()) else None


def _lead(ours: Sequence[float | None] | None, theirs: Sequence[float | None] | None) -> Paired | None:
    pairs = list(zip(ours or (), theirs or (), strict=True))
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return paired(*map(list, zip(*known, strict=True))) if known and len(known) == len(pairs) else None
