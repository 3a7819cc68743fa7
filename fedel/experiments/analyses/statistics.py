"""Appendix C: FedEL compared with every other method, paired by seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedel.experiments import pictures
from fedel.experiments.outcomes import Outcomes
from fedel.experiments.plans import BASELINES, CONTROLS
from fedel.experiments.sections import Picture, Row, Section, Table
from fedel.experiments.stats import paired


def analyse(section: Section, outcomes: Outcomes, paper: Mapping[str, Any]) -> None:  # noqa: ARG001
    section.notes.append(
        "Positive: FedEL has the better final result (points of accuracy; for perplexity, how much lower it "
        "is). The same seed means the same initial model, the same split of the data, and the same "
        "participants if a method draws them."
    )
    for task in outcomes.tasks:
        rows: list[Row] = []
        for label in (*BASELINES, *CONTROLS):
            pairs = outcomes.pairs(task, "fedel", label)
            if not pairs:
                continue
            found = paired([a.sign * a.final for a, _ in pairs], [b.sign * b.final for _, b in pairs])
            low_high = found.difference.half is not None
            rows.append(
                {
                    "FedEL against": label,
                    "pairs": len(pairs),
                    "mean difference": found.difference.mean,
                    "95 % from": found.difference.low if low_high else None,
                    "to": found.difference.high if low_high else None,
                    "p": found.p_value,
                    "test": found.test,
                }
            )
        if not rows:
            continue
        title = outcomes.scale.tasks[task].title
        digits = {**dict.fromkeys(rows[0], 2), "pairs": 0, "p": 3}
        section.tables.append(Table(title, digits, rows))
        values = {label: [o.final for o in outcomes.of(task, label)] for label in outcomes.labels(task)}
        drawn = pictures.boxes(values, f"final {outcomes.scale.tasks[task].metric}")
        section.pictures.append(Picture(f"statistics-{task}", f"{title}: final metric over seeds.", drawn))
