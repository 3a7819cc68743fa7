"""Table 1: result and time of each method, next to the paper's numbers and claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

from fedel.experiments import pictures
from fedel.experiments.outcomes import SMOOTH, Outcomes, mean
from fedel.experiments.plans import BASELINES
from fedel.experiments.sections import Picture, Row, Section, Table, Verdict, shown
from fedel.experiments.stats import Estimate

Paper = Mapping[str, Any]
POINTS_BELOW = 1.0
"""How many points FedEL may be below FedAvg."""
SPEEDUPS = {"cifar10": 1.8}
LARGE_FLEET_SPEEDUP = 3.1
CLEARLY = 2.0
"""Points of accuracy, or percent of perplexity."""


def analyse(section: Section, outcomes: Outcomes, paper: Paper) -> None:
    section.notes += [
        f"Final and best are means of {SMOOTH} tests in a row; ± is half of a 95 % confidence interval over "
        "seeds. Time is virtual, for the same number of rounds, on two clocks: only the backward pass, as in "
        "the paper's simulation, and the whole step. Speed-up uses the first. Time to target: until the metric "
        "is first as good as FedAvg's final one (mean over seeds). Then: the metric at the moment when FedEL "
        "has done all its rounds.",
        "FIARSE's time is proportional to the weights it keeps, as in the literature; dense kernels need "
        "FedAvg's time.",
    ]
    for task in outcomes.tasks:
        if not outcomes.labels(task):
            continue
        target = final(outcomes, task, "fedavg")
        section.tables.append(_table(outcomes, task, paper, target))
        methods = {label: outcomes.of(task, label) for label in outcomes.labels(task)}
        section.pictures.append(
            Picture(
                f"table1-{task}",
                f"{outcomes.scale.tasks[task].title}: all methods over virtual time; dashed: FedAvg's end.",
                pictures.curves(methods, target.mean if target else None),
            )
        )
    for task in outcomes.tasks:
        section.verdicts += _verdicts(outcomes, task, paper)


def final(outcomes: Outcomes, task: str, label: str) -> Estimate | None:
    return outcomes.mean(task, label, lambda o: o.final)


def to_target(outcomes: Outcomes, task: str, label: str) -> Estimate | None:
    """Mean minutes to FedAvg's final metric; infinite if one seed never reaches it."""
    target = final(outcomes, task, "fedavg")
    if target is None:
        return None
    minutes = [o.seconds_to(target.mean) / 60 for o in outcomes.of(task, label)]
    return Estimate(math.inf, None, len(minutes)) if math.inf in minutes else mean(minutes)


def at_its_end(outcomes: Outcomes, task: str, label: str, other: str = "fedel") -> Estimate | None:
    """The metric at the moment when FedEL's run with the same seed ends."""
    found = [ours.at(theirs.seconds()) for ours, theirs in outcomes.pairs(task, label, other)]
    return mean([value for value in found if value is not None])


def _table(outcomes: Outcomes, task: str, paper: Paper, target: Estimate | None) -> Table:
    titled = outcomes.scale.tasks[task]
    metric = titled.metric
    unit = " %" if metric == "accuracy" else ""
    rows: list[Row] = []
    for label in outcomes.labels(task):
        printed = paper.get(label, {}).get(task, {})
        reached = [o.seconds_to(target.mean) for o in outcomes.of(task, label)] if target else []
        times = [seconds / 60 for seconds in reached if seconds < math.inf]
        rows.append(
            {
                "method": label,
                "seeds": len(outcomes.of(task, label)),
                f"final{unit}": final(outcomes, task, label),
                f"best{unit}": outcomes.mean(task, label, lambda o: o.best),
                f"then{unit}": at_its_end(outcomes, task, label),
                "paper": printed.get("metric"),
                "min": outcomes.mean(task, label, lambda o: o.seconds("backward") / 60),
                "min, whole step": outcomes.mean(task, label, lambda o: o.seconds("train") / 60),
                "speed-up": outcomes.speedup(task, label),
                "paper's": printed.get("speedup"),
                "min to target": mean(times),
                "reached": f"{len(times)} of {len(reached)}" if reached else None,
            }
        )
    columns = dict.fromkeys(rows[0], 2) | {
        "seeds": 0,
        **{f"{name}{unit}": 1 for name in ("final", "best", "then")},
    }
    return Table(f"{titled.title}: {metric}", columns, rows, titled.cuts)


def _verdicts(outcomes: Outcomes, task: str, paper: Paper) -> list[Verdict]:
    title = outcomes.scale.tasks[task].title
    return [
        _as_good_as_fedavg(outcomes, task, title),
        _faster(outcomes, task, title),
        _elastictrainer(outcomes, task, title),
        _ahead_in_time(outcomes, task, title),
        _first_to_target(outcomes, task, title),
        *_orderings(outcomes, task, paper, title),
    ]


def _as_good_as_fedavg(outcomes: Outcomes, task: str, title: str) -> Verdict:
    claim = f"{title}: FedEL ends at most {POINTS_BELOW:g} point below FedAvg"
    if outcomes.scale.tasks[task].metric == "perplexity":
        claim = f"{title}: FedEL's perplexity ends at most {POINTS_BELOW:g} % above FedAvg's"
    gain = advantage(outcomes, task, "fedel", "fedavg")
    return Verdict(claim, None if gain is None else gain.mean >= -POINTS_BELOW, shown(gain, 2))


def advantage(outcomes: Outcomes, task: str, label: str, other: str) -> Estimate | None:
    """How much better one method ends than another, per seed: points of accuracy, percent of perplexity."""
    gains = []
    for ours, theirs in outcomes.pairs(task, label, other):
        gain = ours.sign * (ours.final - theirs.final)
        gains.append(100 * gain / theirs.final if ours.lower_is_better else gain)
    return mean(gains)


def _faster(outcomes: Outcomes, task: str, title: str) -> Verdict:
    wanted = SPEEDUPS.get(task, LARGE_FLEET_SPEEDUP)
    found = outcomes.speedup(task, "fedel")
    claim = f"{title}: FedEL is at least {wanted:g} times faster than FedAvg"
    return Verdict(claim, None if found is None else found.mean >= wanted, f"{shown(found, 2)} times")


def _elastictrainer(outcomes: Outcomes, task: str, title: str) -> Verdict:
    claim = f"{title}: ElasticTrainer is as fast as FedEL (to 10 %) and clearly worse (by {CLEARLY:g} or more)"
    pace = outcomes.speedup(task, "elastictrainer", "fedel")
    behind = advantage(outcomes, task, "fedel", "elastictrainer")
    if pace is None or behind is None:
        return Verdict(claim, None)
    numbers = f"time {1 / pace.mean:.2f} of FedEL's; worse by {shown(behind, 2)}"
    return Verdict(claim, abs(1 / pace.mean - 1) <= 0.1 and behind.mean >= CLEARLY, numbers)


def _ahead_in_time(outcomes: Outcomes, task: str, title: str) -> Verdict:
    claim = f"{title}: in the time of FedEL's run, FedAvg gets a worse result"
    ours, theirs = (at_its_end(outcomes, task, label) for label in ("fedel", "fedavg"))
    if ours is None or theirs is None:
        return Verdict(claim, None)
    sign = -1 if outcomes.scale.tasks[task].metric == "perplexity" else 1
    return Verdict(
        claim, sign * ours.mean > sign * theirs.mean, f"FedEL {shown(ours, 1)}, FedAvg {shown(theirs, 1)}"
    )


def _first_to_target(outcomes: Outcomes, task: str, title: str) -> Verdict:
    claim = f"{title}: no baseline reaches FedAvg's final metric sooner than FedEL"
    ours = to_target(outcomes, task, "fedel")
    theirs = {label: to_target(outcomes, task, label) for label in BASELINES if outcomes.of(task, label)}
    if ours is None or not theirs:
        return Verdict(claim, None)
    sooner = [
        f"{label} after {shown(e, 2)}" for label, e in theirs.items() if e is not None and e.mean < ours.mean
    ]
    known = len(theirs) == len(BASELINES)
    numbers = f"minutes: FedEL {shown(ours, 2)}; sooner: {', '.join(sooner) or 'none'}"
    return Verdict(claim, False if sooner else True if known else None, numbers)


def _orderings(outcomes: Outcomes, task: str, paper: Paper, title: str) -> list[Verdict]:
    """How many pairs of methods are in the paper's order."""
    sign = -1 if outcomes.scale.tasks[task].metric == "perplexity" else 1
    labels = [label for label in outcomes.labels(task) if task in paper.get(label, {})]
    complete = len(labels) == len(BASELINES) + 1
    figures: dict[str, tuple[Callable[[str], float], Callable[[str], float]]] = {
        "metric": (
            lambda label: sign * _mean(final(outcomes, task, label)),
            lambda label: sign * float(paper[label][task]["metric"]),
        ),
        "speed": (
            lambda label: _mean(outcomes.speedup(task, label)),
            lambda label: float(paper[label][task]["speedup"]),
        ),
    }
    found = []
    for name, (ours, printed) in figures.items():
        pairs = [(a, b) for a, b in combinations(labels, 2) if printed(a) != printed(b)]
        same = [(a, b) for a, b in pairs if (ours(a) > ours(b)) == (printed(a) > printed(b))]
        numbers = f"{len(same)} of {len(pairs)} pairs of methods in the paper's order"
        claim = f"{title}: the complete order of the paper by {name}"
        found.append(Verdict(claim, len(same) == len(pairs) if complete else None, numbers))
    return found


def _mean(found: Estimate | None) -> float:
    return math.nan if found is None else found.mean
