"""FedEL with more, shorter rounds than the others: does it reach FedAvg's result, and when?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedel.experiments import pictures
from fedel.experiments.analyses.table1 import final, to_target
from fedel.experiments.outcomes import Outcomes
from fedel.experiments.plans import BASELINES, LONGER
from fedel.experiments.sections import Picture, Row, Section, Table, Verdict, shown


def analyse(section: Section, outcomes: Outcomes, paper: Mapping[str, Any]) -> None:  # noqa: ARG001
    section.notes.append(
        "In table 1 every method has the same number of rounds. FedEL does less work in each round, so here it "
        "gets twice as many, but no more time than FedAvg; the learning rate ends at the same value. Baselines "
        "with equally short rounds did not get more rounds."
    )
    for task in outcomes.tasks:
        rows: list[Row] = [
            {
                "method": label,
                "rounds": len(outcomes.of(task, label)[0].report.rounds),
                "final": final(outcomes, task, label),
                "min": outcomes.mean(task, label, lambda o: o.seconds() / 60),
                "min to target": to_target(outcomes, task, label),
            }
            for label in outcomes.labels(task)
        ]
        if not rows:
            continue
        title, target = outcomes.scale.tasks[task].title, final(outcomes, task, "fedavg")
        section.tables.append(Table(title, dict.fromkeys(rows[0], 2) | {"rounds": 0}, rows))
        curves = {label: outcomes.of(task, label) for label in outcomes.labels(task)}
        drawn = pictures.curves(curves, target.mean if target else None)
        caption = f"{title}: over virtual time; dashed: FedAvg's final result."
        section.pictures.append(Picture(f"longer-{task}", caption, drawn))
        section.verdicts.append(_soonest(outcomes, task, title))


def _soonest(outcomes: Outcomes, task: str, title: str) -> Verdict:
    claim = f"{title}: with twice the rounds, FedEL reaches FedAvg's final result before any baseline"
    ours = to_target(outcomes, task, LONGER)
    theirs = {label: to_target(outcomes, task, label) for label in BASELINES if outcomes.of(task, label)}
    if ours is None or len(theirs) < len(BASELINES):
        return Verdict(claim, None)
    first = min((found.mean, label) for label, found in theirs.items() if found is not None)
    numbers = f"minutes: FedEL {shown(ours, 2)}; fastest other method {first[1]}, {shown(first[0], 2)}"
    return Verdict(claim, ours.mean <= first[0], numbers)
