"""Appendix C, table of deviations: how long a round takes compared with T_th, in both scopes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from fedel.experiments import pictures
from fedel.experiments.outcomes import Outcome, Outcomes
from fedel.experiments.sections import Picture, Row, Section, Table, Verdict, shown
from fedel.experiments.stats import Estimate, at_most

SCOPES = {
    "fedel": "backward",
    "fedel, probe in T_th": "backward, probe in T_th",
    "fedel, whole step": "whole step",
}


def analyse(section: Section, outcomes: Outcomes, paper: Mapping[str, Any]) -> None:
    section.notes.append(
        "A round takes as long as its slowest client. The importance probe is two more passes per round. It "
        "comes on top of T_th, as in the paper, and its share grows when a round has fewer steps: the paper "
        "measured 2.4 %, the share with about 80 steps. With probe_in_budget a client trains less instead, so "
        "that both fit into T_th. The paper's scope is the backward pass. If the whole step counts, T_th is "
        "the whole step of the fastest device, and a slow device may need longer than that only for the "
        "forward pass of a deep window."
    )
    rows: list[Row] = []
    for task in outcomes.tasks:
        printed = paper.get(task, {})
        for label, scope in SCOPES.items():
            if not outcomes.of(task, label):
                continue
            mean = _mean_of(outcomes, task, label)
            rows.append(
                {
                    "task": outcomes.scale.tasks[task].title,
                    "scope": scope,
                    "round %": mean(by_round),
                    "paper %": printed.get("percent") if label != "fedel, whole step" else None,
                    "per client %": mean(by_client),
                    "largest client %": mean(largest),
                    "without probe %": mean(without_probe),
                    "FedAvg's round / T_th": _fedavg(outcomes, task, label),
                    "paper's": printed["fedavg"] / printed["budget"] if printed else None,
                }
            )
        section.verdicts += _verdicts(outcomes, task, printed)
    if rows:
        section.tables.append(Table("FedEL's training time above T_th", dict.fromkeys(rows[0], 2), rows))
        section.pictures.append(
            Picture("deviation", "Mean over rounds of round time / T_th - 1.", _picture(rows))
        )


def by_round(outcome: Outcome) -> float:
    """Percent by which a round takes longer than T_th, mean over rounds."""
    return 100 * statistics.fmean(
        r.latency_seconds / max(e.budget_seconds for e in r.clients) - 1
        for r in outcome.report.rounds
        if r.clients
    )


def by_client(outcome: Outcome) -> float:
    """The same for single clients, mean over all clients and rounds."""
    return 100 * statistics.fmean(outcome.report.deviations())


def largest(outcome: Outcome) -> float:
    return 100 * max(outcome.report.deviations())


def without_probe(outcome: Outcome) -> float:
    rounds = [[e.predicted_deviation for e in r.clients] for r in outcome.report.rounds]
    predicted = [[deviation for deviation in found if deviation is not None] for found in rounds]
    return 100 * statistics.fmean(max(found) for found in predicted if found)


def _mean_of(
    outcomes: Outcomes, task: str, label: str
) -> Callable[[Callable[[Outcome], float]], Estimate | None]:
    return lambda figure: outcomes.mean(task, label, figure)


def _fedavg(outcomes: Outcomes, task: str, label: str) -> float | None:
    """A round of FedAvg in units of T_th. It trains the same in both scopes; only the clock differs."""
    fedavg, fedel = outcomes.first(task, "fedavg"), outcomes.first(task, label)
    if fedavg is None or fedel is None:
        return None
    scope = fedel.report.rounds[0].scope
    budget = statistics.fmean(max(e.budget_seconds for e in r.clients) for r in fedel.report.rounds)
    return statistics.fmean(r.clock_seconds[scope] for r in fedavg.report.rounds) / budget


def _verdicts(outcomes: Outcomes, task: str, printed: Mapping[str, Any]) -> list[Verdict]:
    limit, found = printed.get("percent"), []
    if limit is None:
        return []  # a task that the paper does not have
    for label, words in {"fedel": "", "fedel, probe in T_th": ", the probe in T_th"}.items():
        mean = outcomes.mean(task, label, by_round)
        title = outcomes.scale.tasks[task].title
        claim = f"{title}: a round is at most {limit} % above T_th, as in the paper{words}"
        found.append(Verdict(claim, at_most(mean, limit), f"{shown(mean, 2)} %"))
    return found


def _picture(rows: list[Row]) -> str:
    groups: dict[str, dict[str, Estimate]] = {}
    for row in rows:
        group = groups.setdefault(row["task"].split(",")[0].split(" (")[0], {})
        group[row["scope"]] = row["round %"]
        if row["paper %"] is not None:
            group["paper, backward"] = Estimate(row["paper %"], None, 1)
    return pictures.bars(groups, "round above T_th (%)")
