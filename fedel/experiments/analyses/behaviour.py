"""What FedEL does during a run: selected tensors per device type, time per round, importance across clients."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from fedel.experiments import importance as probes
from fedel.experiments import pictures
from fedel.experiments.outcomes import Outcome, Outcomes, mean
from fedel.experiments.sections import Picture, Row, Section, Table
from fedel.experiments.stats import Estimate

Paper = Mapping[str, Any]


def selection(section: Section, outcomes: Outcomes, paper: Paper) -> None:  # noqa: ARG001
    section.notes.append("One client per device type, seed 1. Each square is a tensor trained in that round.")
    rows: list[Row] = []
    for task in outcomes.tasks:
        for label in ("fedel", "elastictrainer"):
            outcome = outcomes.first(task, label)
            if outcome is None:
                continue
            title = f"{outcomes.scale.tasks[task].title}: {label}"
            section.pictures.append(Picture(f"selection-{task}-{label}", title, pictures.selection(outcome)))
            rows += [{"run": title, **row} for row in _coverage(outcome)]
    if rows:
        section.tables.append(Table("How much of the model a device trains", dict.fromkeys(rows[0], 1), rows))


def _coverage(outcome: Outcome) -> list[Row]:
    """Per device type: tensors in a round, and in all rounds together, as a share of all tensors."""
    assert outcome.report.result is not None  # outcomes are of runs that are done
    total = len(outcome.report.result.tensors)
    rounds: dict[str, list[float]] = {}
    ever: dict[str, dict[str, set[str]]] = {}
    for record in outcome.report.rounds:
        for entry in record.clients:
            kind = entry.device_type
            rounds.setdefault(kind, []).append(100 * entry.num_selected / total)
            ever.setdefault(kind, {}).setdefault(entry.client, set()).update(entry.selected)
    return [
        {
            "device": kind,
            "tensors per round %": statistics.fmean(shares),
            "in all rounds %": statistics.fmean(100 * len(names) / total for names in ever[kind].values()),
        }
        for kind, shares in sorted(rounds.items())
    ]


def devices(section: Section, outcomes: Outcomes, paper: Paper) -> None:  # noqa: ARG001
    section.notes.append(
        "Mean virtual seconds of training per device and round; only the backward pass counts."
    )
    for task in outcomes.tasks:
        groups: dict[str, dict[str, Estimate]] = {}
        for label in outcomes.labels(task):
            kinds = [_seconds_by_kind(outcome) for outcome in outcomes.of(task, label)]
            for kind in sorted({kind for seconds in kinds for kind in seconds}):
                found = mean(seconds[kind] for seconds in kinds if kind in seconds)
                if found is not None:
                    groups.setdefault(label, {})[kind] = found
        if not groups:
            continue
        rows: list[Row] = [{"method": label, **group} for label, group in groups.items()]
        title = outcomes.scale.tasks[task].title
        section.tables.append(Table(title, dict.fromkeys(rows[0], 3), rows))
        drawn = pictures.bars(groups, "seconds per round")
        section.pictures.append(Picture(f"devices-{task}", f"{title}: training time per round.", drawn))


def _seconds_by_kind(outcome: Outcome) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}
    for record in outcome.report.rounds:
        for entry in record.clients:
            seconds.setdefault(entry.device_type, []).append(entry.clock_seconds["backward"])
    return {kind: statistics.fmean(values) for kind, values in seconds.items()}


def importance(section: Section, outcomes: Outcomes, paper: Paper) -> None:  # noqa: ARG001
    section.notes.append(
        "Importance of every tensor of the final model (one trial step, divided by the largest value), as "
        "measured by each client on its own data, and on the data of all clients together."
    )
    for task in outcomes.tasks:
        outcome = outcomes.first(task, "fedel")
        if outcome is None:
            continue
        found = probes.measured(outcome.plan, outcome.report.path)
        title = outcomes.scale.tasks[task].title
        rows = {
            **{c: list(v.values()) for c, v in found.clients.items()},
            "all data": list(found.together.values()),
        }
        drawn = pictures.heat(rows, "tensor, input to output", "importance")
        section.pictures.append(Picture(f"importance-{task}", f"{title}: importance per client.", drawn))
        table: list[Row] = [
            {"between": "two clients", "correlation": found.between_clients},
            {"between": "one client and all data", "correlation": found.with_together},
        ]
        section.tables.append(
            Table(f"{title}: rank correlation of importance", {"between": 0, "correlation": 2}, table)
        )
