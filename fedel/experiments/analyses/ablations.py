"""Variants of FedEL: wrapped by FedProx and FedNova, without rollback, with other beta, T_th and windows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from fedel.experiments import pictures
from fedel.experiments.analyses.table1 import NEARLY, final, minutes_to
from fedel.experiments.outcomes import Outcome, Outcomes, mean
from fedel.experiments.plans import BUDGETS
from fedel.experiments.sections import Picture, Row, Section, Table, Verdict, shown
from fedel.experiments.stats import UNKNOWN, all_of, at_least

Paper = Mapping[str, Any]


def composition(section: Section, outcomes: Outcomes, paper: Paper) -> None:
    section.notes.append(
        "Here local work is counted in passes over a client's own data, so that clients do different numbers "
        "of steps, which FedNova corrects."
    )
    for task in outcomes.tasks:
        rows: list[Row] = []
        for label in outcomes.labels(task):
            without = label.removesuffix("-fedel")
            printed = paper.get(label, {})
            rows.append(
                {
                    "method": label,
                    "final": final(outcomes, task, label),
                    "paper": printed.get("accuracy"),
                    "min": outcomes.mean(task, label, lambda o: o.seconds() / 60),
                    "rounds shorter": outcomes.shorter(task, label, without) if without != label else None,
                    "paper's": printed.get("speedup"),
                }
            )
        _add(section, outcomes, task, rows)
        for base in ("fedprox", "fednova"):
            gain = outcomes.lead(task, f"{base}-fedel", base)
            pace = outcomes.shorter(task, f"{base}-fedel", base)
            claim = f"{base} with FedEL ends at most 1 point below {base} without FedEL, in less time"
            answer = all_of(at_least(gain, -1), at_least(pace, 1))
            section.verdicts.append(Verdict(claim, answer, f"{shown(gain, 2)} points, {shown(pace, 2)} times"))


def rollback(section: Section, outcomes: Outcomes, paper: Paper) -> None:
    section.notes.append("O1 is computed over participants and tensors; 0 for a tensor that no client trained.")
    for task in outcomes.tasks:
        rows: list[Row] = []
        for label in outcomes.labels(task):
            rows.append(
                {
                    "variant": label,
                    "O1 mean": outcomes.mean(task, label, lambda o: statistics.fmean(_o1(o))),
                    "paper": paper.get(label, {}).get("mean"),
                    "O1 std": outcomes.mean(task, label, lambda o: statistics.pstdev(_o1(o))),
                    "paper's": paper.get(label, {}).get("std"),
                    "final": final(outcomes, task, label),
                }
            )
        _add(section, outcomes, task, rows)
        pairs = outcomes.pairs(task, "rollback", "no-rollback")
        gap = mean(statistics.fmean(_o1(b)) - statistics.fmean(_o1(a)) for a, b in pairs)
        claim = f"{outcomes.scale.tasks[task].title}: O1 is smaller with rollback"
        section.verdicts.append(Verdict(claim, at_least(gap, 0), f"smaller by {shown(gap, 2)}"))


def _o1(outcome: Outcome) -> list[float]:
    return [record.o1 for record in outcome.report.rounds]


def beta(section: Section, outcomes: Outcomes, paper: Paper) -> None:  # noqa: ARG001
    for task in outcomes.tasks:
        _against_fedavg(section, outcomes, task)
        groups = {
            label.removeprefix("beta "): {"final": found}
            for label in outcomes.labels(task)
            if label != "fedavg" and (found := final(outcomes, task, label)) is not None
        }
        fedavg = final(outcomes, task, "fedavg")
        if groups:
            drawn = pictures.bars(groups, "final metric", fedavg.mean if fedavg else None)
            section.pictures.append(
                Picture(f"beta-{task}-final", "Final metric for each beta; dashed: FedAvg.", drawn)
            )
        middle, ends = ("beta 0.4", "beta 0.6"), ("beta 0", "beta 1")
        gains = {f"{a} over {b}": outcomes.lead(task, a, b) for a in middle for b in ends}
        numbers = ", ".join(f"{name}: {shown(gain, 2)}" for name, gain in gains.items())
        claim = f"{outcomes.scale.tasks[task].title}: beta 0.4 and 0.6 give better results than 0 and 1"
        answer = all_of(*(at_least(gain, 0) for gain in gains.values()))
        section.verdicts.append(Verdict(claim, answer, numbers))


def budget(section: Section, outcomes: Outcomes, paper: Paper) -> None:  # noqa: ARG001
    labels = [f"T_th x {share:g}" for share in BUDGETS]
    section.notes.append(
        "At equal time: the metric at the moment when the variant with the least virtual time ends. The paper "
        "also stops all variants at the same time. With a smaller T_th rounds are shorter, so there are more."
    )
    for task in outcomes.tasks:
        _against_fedavg(section, outcomes, task)
        found = [o for label in labels for o in outcomes.of(task, label)]
        claim = f"{outcomes.scale.tasks[task].title}: a smaller T_th is worse at equal time"
        if not all(outcomes.of(task, label) for label in labels):
            section.verdicts.append(Verdict(claim, UNKNOWN))
            continue
        moment = min(outcome.seconds() for outcome in found)
        reached = {
            label: found_then
            for label in labels
            if (
                found_then := mean(
                    value for o in outcomes.of(task, label) if (value := o.at(moment)) is not None
                )
            )
        }
        rows: list[Row] = [{"variant": label, "at equal time": value} for label, value in reached.items()]
        section.tables.append(
            Table(f"After {moment / 60:.2f} virtual minutes", {"variant": 0, "at equal time": 1}, rows)
        )
        pairs = pairwise(labels)  # the moment is the end of the shortest, give or take a round
        leads = [outcomes.lead(task, b, a, end_of=labels[0]) for a, b in pairs]
        numbers = ", ".join(f"{label}: {shown(value, 1)}" for label, value in reached.items())
        section.verdicts.append(Verdict(claim, all_of(*(at_least(lead, 0) for lead in leads)), numbers))


def window(section: Section, outcomes: Outcomes, paper: Paper) -> None:  # noqa: ARG001
    for task in outcomes.tasks:
        _against_fedavg(section, outcomes, task)
        gain = outcomes.lead(task, "fedel", "fedel-c")
        claim = f"{outcomes.scale.tasks[task].title}: FedEL has a better final result than FedEL-C"
        section.verdicts.append(Verdict(claim, at_least(gain, 0), f"better by {shown(gain, 2)}"))
        disjoint = outcomes.first(task, "fedel-c")
        if disjoint:
            caption = f"{outcomes.scale.tasks[task].title}: tensors selected by FedEL-C."
            section.pictures.append(Picture(f"window-{task}-fedel-c", caption, pictures.selection(disjoint)))


def _against_fedavg(section: Section, outcomes: Outcomes, task: str) -> None:
    """One row per variant: its final result, the comparison with FedAvg per seed, and when it is as good."""
    rows: list[Row] = [
        {
            "variant": label,
            "seeds": len(outcomes.of(task, label)),
            "final": final(outcomes, task, label),
            "best": outcomes.mean(task, label, lambda o: o.best),
            "above FedAvg": outcomes.lead(task, label, "fedavg") if label != "fedavg" else None,
            "min": outcomes.mean(task, label, lambda o: o.seconds() / 60),
            "min to 95 %": minutes_to(outcomes, task, label, NEARLY),
        }
        for label in outcomes.labels(task)
    ]
    _add(section, outcomes, task, rows)


def _add(section: Section, outcomes: Outcomes, task: str, rows: list[Row]) -> None:
    """The table, and the curves behind it."""
    if not rows:
        return
    title = outcomes.scale.tasks[task].title
    digits = dict.fromkeys(rows[0], 2)
    section.tables.append(Table(title, digits | ({"seeds": 0} if "seeds" in digits else {}), rows))
    methods = {label: outcomes.of(task, label) for label in outcomes.labels(task)}
    drawn = pictures.curves(methods)
    section.pictures.append(Picture(f"{section.name}-{task}", f"{title}: over virtual time.", drawn))
