"""Table 1: result and time of each method, next to the paper's numbers and claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

from fedel.experiments import pictures
from fedel.experiments.outcomes import CLOCKS, HOLD, Outcomes, mean
from fedel.experiments.plans import BASELINES
from fedel.experiments.sections import Picture, Row, Section, Table, Verdict, shown
from fedel.experiments.stats import (
    FAILS,
    HOLDS,
    UNDECIDED,
    UNKNOWN,
    Answer,
    Estimate,
    all_of,
    at_least,
    at_most,
)
from fedel.report.curves import SMOOTH

Paper = Mapping[str, Any]
POINTS_BELOW = 1.0
"""How many points FedEL may be below FedAvg."""
SHORTER = {"cifar10": 1.8}
LARGE_FLEET_SHORTER = 3.1
CLEARLY = 2.0
"""Points of accuracy, or percent of perplexity."""
NEARLY = 0.95
"""Share of FedAvg's final metric that counts as a target besides all of it."""


def analyse(section: Section, outcomes: Outcomes, paper: Paper) -> None:
    section.notes += [
        "Time is virtual, on two clocks: only the backward pass, as in the paper's simulation, and the whole "
        f"step. Minutes to 95 and 100 %: until the mean of the tests in the last {100 * SMOOTH:g} % of the "
        f"time so far is that share of FedAvg's final metric with the same seed, and stays so for {HOLD} tests "
        "(mean over the runs that get there). "
        "Final: the mean of the tests in the last quarter of a run; ± is half of a 95 % confidence interval "
        "over seeds. Then: the metric at the moment when FedEL has done all its rounds. Best is for "
        "information; no claim uses it. 'Rounds shorter' compares the length of a round and says nothing about "
        "what it is worth; the paper calls it speed-up, since its methods run for the same number of rounds.",
        "FIARSE's time is proportional to the weights it keeps, as in the literature; dense kernels need "
        "FedAvg's time. DepthFL answers with the mean of its exits; 'last exit' is its classifier alone, which "
        "is what all other methods are tested by. `fedavg-cut` and `fedavg-fast` are controls, not methods of "
        "the paper: FedAvg with the steps of slow devices cut to T_th, and on the fast devices alone.",
    ]
    for task in outcomes.tasks:
        if not outcomes.labels(task):
            continue
        target = final(outcomes, task, "fedavg")
        section.tables.append(_table(outcomes, task, paper))
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


def minutes_to(outcomes: Outcomes, task: str, label: str, share: float = 1.0, scope: str = "") -> Any:
    """Mean minutes to a share of FedAvg's final metric, with how many runs got there if not all did."""
    found = outcomes.seconds_to(task, label, share, scope)
    reached = [seconds / 60 for seconds in found if seconds < math.inf]
    if not found or len(reached) == len(found):
        return mean(reached)
    return f"{shown(mean(reached), 2)} ({len(reached)} of {len(found)})" if reached else math.inf


def _table(outcomes: Outcomes, task: str, paper: Paper) -> Table:
    titled = outcomes.scale.tasks[task]
    metric = titled.metric
    unit = " %" if metric == "accuracy" else ""
    rows: list[Row] = []
    for label in outcomes.labels(task):
        printed = paper.get(label, {}).get(task, {})
        times = {
            f"min to {100 * share:g} %" + ("" if scope == "backward" else f", {clock}"): minutes_to(
                outcomes, task, label, share, scope
            )
            for scope, clock in CLOCKS.items()
            for share in (NEARLY, 1.0)
        }
        last_exits = [o.last_exit for o in outcomes.of(task, label)] if label == "depthfl" else []
        rows.append(
            {
                "method": label,
                "seeds": len(outcomes.of(task, label)),
                **times,
                f"final{unit}": final(outcomes, task, label),
                f"last exit{unit}": mean([value for value in last_exits if value is not None]),
                f"then{unit}": outcomes.at_end_of(task, label, "fedel"),
                f"best{unit}": outcomes.mean(task, label, lambda o: o.best),
                "paper": printed.get("metric"),
                "min": outcomes.mean(task, label, lambda o: o.seconds("backward") / 60),
                "min, whole step": outcomes.mean(task, label, lambda o: o.seconds("train") / 60),
                "rounds shorter": outcomes.shorter(task, label),
                "paper's": printed.get("speedup"),
            }
        )
    columns = dict.fromkeys(rows[0], 2) | {
        "seeds": 0,
        **{f"{name}{unit}": 1 for name in ("final", "last exit", "best", "then")},
    }
    return Table(f"{titled.title}: {metric}", columns, rows, titled.cuts)


def _verdicts(outcomes: Outcomes, task: str, paper: Paper) -> list[Verdict]:
    title = outcomes.scale.tasks[task].title
    return [
        *(_sooner(outcomes, task, title, scope) for scope in CLOCKS),
        _first_to_target(outcomes, task, title),
        _ahead_in_time(outcomes, task, title),
        _as_good_as_fedavg(outcomes, task, title),
        _shorter(outcomes, task, title),
        _elastictrainer(outcomes, task, title),
        *_orderings(outcomes, task, paper, title),
    ]


def _sooner(outcomes: Outcomes, task: str, title: str, scope: str) -> Verdict:
    race = outcomes.race(task, "fedel", "fedavg", NEARLY, scope)
    claim = f"{title}: FedEL reaches 95 % of FedAvg's final metric sooner than FedAvg ({CLOCKS[scope]})"
    return Verdict(claim, race.sooner, race.numbers)


def _first_to_target(outcomes: Outcomes, task: str, title: str) -> Verdict:
    claim = f"{title}: FedEL reaches 95 % of FedAvg's final metric sooner than every baseline"
    races = {label: outcomes.race(task, "fedel", label, NEARLY) for label in BASELINES}
    answers = {label: race.sooner for label, race in races.items()}
    sooner = [f"{label}: {races[label].numbers}" for label, answer in answers.items() if answer == FAILS]
    numbers = f"sooner than FedEL: {'; '.join(sooner) or 'none for sure'}"
    return Verdict(claim, all_of(*answers.values()), numbers)


def _ahead_in_time(outcomes: Outcomes, task: str, title: str) -> Verdict:
    claim = f"{title}: in the time of FedEL's run, FedAvg gets a worse result"
    ours, theirs = (outcomes.at_end_of(task, label, "fedel") for label in ("fedel", "fedavg"))
    lead = outcomes.lead(task, "fedel", "fedavg", end_of="fedel")
    return Verdict(claim, at_least(lead, 0.0), f"FedEL {shown(ours, 1)}, FedAvg {shown(theirs, 1)}")


def _as_good_as_fedavg(outcomes: Outcomes, task: str, title: str) -> Verdict:
    claim = f"{title}: after the same rounds FedEL is at most {POINTS_BELOW:g} point below FedAvg"
    if outcomes.scale.tasks[task].metric == "perplexity":
        claim = (
            f"{title}: after the same rounds FedEL's perplexity is at most {POINTS_BELOW:g} % above FedAvg's"
        )
    gain = outcomes.lead(task, "fedel", "fedavg")
    return Verdict(claim, at_least(gain, -POINTS_BELOW), shown(gain, 2))


def _shorter(outcomes: Outcomes, task: str, title: str) -> Verdict:
    wanted = SHORTER.get(task, LARGE_FLEET_SHORTER)
    found, whole = (outcomes.shorter(task, "fedel", scope=scope) for scope in ("backward", "train"))
    claim = (
        f"{title}: FedEL's rounds are at least {wanted:g} times shorter than FedAvg's (speed-up in the paper)"
    )
    numbers = f"{shown(found, 2)} times; the whole step {shown(whole, 2)}"
    return Verdict(claim, at_least(found, wanted), numbers)


def _elastictrainer(outcomes: Outcomes, task: str, title: str) -> Verdict:
    claim = f"{title}: ElasticTrainer is as fast as FedEL (to 10 %) and clearly worse (by {CLEARLY:g} or more)"
    pace = outcomes.shorter(task, "fedel", "elastictrainer")
    behind = outcomes.lead(task, "fedel", "elastictrainer")
    numbers = f"its rounds take {shown(pace, 2)} of FedEL's time; worse by {shown(behind, 2)}"
    answer = all_of(at_least(pace, 0.9), at_most(pace, 1.1), at_least(behind, CLEARLY))
    return Verdict(claim, answer, numbers)


def _orderings(outcomes: Outcomes, task: str, paper: Paper, title: str) -> list[Verdict]:
    """How many pairs of methods are in the paper's order, as far as the seeds can tell."""
    if not any(task in printed for printed in paper.values()):
        return []  # a task that the paper does not have
    labels = [label for label in outcomes.labels(task) if task in paper.get(label, {})]
    complete = len(labels) == len(BASELINES) + 1
    sign = -1 if outcomes.scale.tasks[task].metric == "perplexity" else 1

    def ahead(a: str, b: str) -> Answer:
        return at_least(outcomes.lead(task, a, b), 0.0)

    def shorter(a: str, b: str) -> Answer:
        return at_least(outcomes.shorter(task, a, b), 1.0)

    figures: dict[str, tuple[Callable[[str, str], Answer], Callable[[str], float]]] = {
        "metric": (ahead, lambda label: sign * float(paper[label][task]["metric"])),
        "length of a round": (shorter, lambda label: float(paper[label][task]["speedup"])),
    }
    found = []
    for name, (ours, printed) in figures.items():
        pairs = [(a, b) if printed(a) > printed(b) else (b, a) for a, b in combinations(labels, 2)]
        answers = [ours(a, b) for a, b in pairs if printed(a) != printed(b)]
        counted = {answer: answers.count(answer) for answer in (HOLDS, UNDECIDED, FAILS)}
        numbers = (
            f"of {len(answers)} pairs of methods {counted[HOLDS]} in the paper's order, "
            f"{counted[FAILS]} in the other, {counted[UNDECIDED]} undecided"
        )
        claim = f"{title}: the complete order of the paper by {name}"
        found.append(Verdict(claim, all_of(*answers) if complete else UNKNOWN, numbers))
    return found
