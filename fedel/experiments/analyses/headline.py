"""The decisive comparison: FedEL, FedAvg and simple ways to keep T_th; and what the preset's parts do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedel.experiments import pictures
from fedel.experiments.analyses.table1 import POINTS_BELOW, final
from fedel.experiments.outcomes import CLOCKS, HOLD, Outcome, Outcomes, mean
from fedel.experiments.plans import BEST, CONTROLS, CUT_BEST, WHOLE_STEP
from fedel.experiments.sections import Picture, Row, Section, Table, Verdict, shown
from fedel.experiments.stats import at_least
from fedel.report.curves import SMOOTH

Paper = Mapping[str, Any]
SHARES = (0.9, 0.95, 1.0)
"""Of FedAvg's plateau."""
TARGET = 0.95
AHEAD = 3.0
"""Points of accuracy, or percent of perplexity."""
NAMES = {
    BEST: "FedEL, preset",
    "fedel": "FedEL as in the paper",
    "fedavg": "FedAvg",
    "fedavg-cut": "control: fewer steps on slow devices",
    CUT_BEST: "control: fewer steps, improved",
    "fedavg-fast": "control: only the fast devices",
}
"""For readers; in the order of the picture's lines."""
OPENING = {
    BEST: "FedEL",
    "fedavg": "FedAvg",
    "fedavg-cut": "fewer steps",
    CUT_BEST: "fewer steps, improved",
    "fedavg-fast": "only fast devices",
}
"""Columns of the table that opens the page."""


def analyse(section: Section, outcomes: Outcomes, paper: Paper) -> None:  # noqa: ARG001
    section.notes.append(
        "All devices take part in every round. FedEL and the controls have rounds of about T_th, so they get "
        "more rounds than FedAvg, all of them the same number, and still less time; the learning rate ends at "
        "the same value. On the clock of the whole step, FedEL's T_th counts the whole step too; FedAvg and "
        "the controls train the same either way. A point of a curve is the mean of the tests in the last "
        f"{100 * SMOOTH:g} % of the time so far; a target counts from the first of {HOLD} tests in a row that "
        f"hold it. Plateau: the mean of the last quarter of the tests. `{CUT_BEST}` is the control with fewer "
        "steps and those parts of the preset that it can have. ± is half of a 95 % confidence interval "
        "over seeds; the ( ) behind a ratio is the interval of its geometric mean. Bands in pictures go from "
        "the lowest to the highest seed."
    )
    for task in outcomes.tasks:
        lines = {scope: _lines(outcomes, task, scope) for scope in CLOCKS}
        if not any(lines.values()):
            continue
        title = outcomes.scale.tasks[task].title
        panels = {f"time of the {clock}": (lines[scope], scope) for scope, clock in CLOCKS.items()}
        drawn = pictures.over_time(panels, TARGET)
        caption = f"{title}: accuracy over training time; 100 % is the time of FedAvg's run."
        section.pictures.append(Picture(f"headline-{task}", caption, drawn))
        for scope in CLOCKS:
            section.tables.append(_table(outcomes, task, scope))
            section.verdicts += _verdicts(outcomes, task, scope)
    section.opening = _opening(outcomes)


def _opening(outcomes: Outcomes) -> Table | None:
    """A row per task: who is where when FedEL's run ends, and where FedAvg is at its own end."""
    best, rows = label_on("train", BEST), list[Row]()
    for task in outcomes.tasks:
        runs = outcomes.pairs(task, best, "fedavg")
        if runs:
            share = 100 * runs[0][0].seconds("train") / runs[0][1].seconds("train")
            rows.append(
                {
                    "task": outcomes.scale.tasks[task].title,
                    "seeds": len(runs),
                    "time": f"{share:.0f} %",
                    **{
                        OPENING[m]: outcomes.at_end_of(task, label_on("train", m), best, "train")
                        for m in OPENING
                    },
                    "FedAvg at its end": final(outcomes, task, "fedavg"),
                    "sooner": outcomes.race(task, best, "fedavg", TARGET, "train").factor,
                }
            )
    columns = {"task": 0, "seeds": 0, "time": 0, **dict.fromkeys(OPENING.values(), 1), "FedAvg at its end": 1}
    note = (
        "After the same time, that of FedEL's run, as a share of FedAvg's; the whole training step counts. "
        "Accuracy in %, of text perplexity (lower is better). 'Sooner': how many times sooner FedEL is at "
        f"{100 * TARGET:g} % of what FedAvg ends at. FedEL is our preset. 'Fewer steps': FedAvg whose slow "
        "devices make fewer steps; 'improved': with those parts of the preset that it can have. ± and ( ): "
        "95 % intervals over seeds."
    )
    return Table("After the same time", {**columns, "sooner": 1}, rows, note) if rows else None


def label_on(scope: str, method: str) -> str:
    """The label of a method's runs for a clock: those of FedEL hold T_th against that clock."""
    return method + WHOLE_STEP if scope == "train" and method in (BEST, "fedel") else method


def _lines(outcomes: Outcomes, task: str, scope: str) -> dict[str, list[Outcome]]:
    found = {name: outcomes.of(task, label_on(scope, method)) for method, name in NAMES.items()}
    return {name: runs for name, runs in found.items() if runs}


def _table(outcomes: Outcomes, task: str, scope: str) -> Table:
    titled, end = outcomes.scale.tasks[task], label_on(scope, "fedel")
    rows: list[Row] = []
    for method, name in NAMES.items():
        label = label_on(scope, method)
        if not outcomes.of(task, label):
            continue
        rows.append(
            {
                "method": name,
                "seeds": len(outcomes.of(task, label)),
                "at half of FedEL's time": outcomes.at_end_of(task, label, end, scope, share=0.5),
                "at FedEL's end": outcomes.at_end_of(task, label, end, scope),
                **{
                    f"s to {100 * share:g} %": seconds_to(outcomes, task, label, share, scope)
                    for share in SHARES
                },
                "plateau": final(outcomes, task, label),
                "s in all": outcomes.mean(task, label, lambda o: o.seconds(scope)),
            }
        )
    columns = {"method": 0, "seeds": 0, **dict.fromkeys(list(rows[0])[2:], 1)} if rows else {}
    return Table(f"{titled.title}: {titled.metric}, {CLOCKS[scope]}", columns, rows, titled.cuts)


def seconds_to(outcomes: Outcomes, task: str, label: str, share: float, scope: str) -> Any:
    """Mean seconds to a share of FedAvg's plateau, with how many runs got there if not all did."""
    found = outcomes.seconds_to(task, label, share, scope)
    reached = [seconds for seconds in found if seconds < math.inf]
    if not found or len(reached) == len(found):
        return mean(reached)
    return f"{shown(mean(reached), 1)} ({len(reached)} of {len(found)})" if reached else math.inf


def _verdicts(outcomes: Outcomes, task: str, scope: str) -> list[Verdict]:
    title, clock = outcomes.scale.tasks[task].title, CLOCKS[scope]
    best, fedel = label_on(scope, BEST), label_on(scope, "fedel")
    found = []
    for label, name in ((best, "the preset"), (fedel, "the paper's FedEL")):
        race = outcomes.race(task, label, "fedavg", TARGET, scope)
        claim = f"{title}: {name} reaches 95 % of FedAvg's plateau sooner than FedAvg ({clock})"
        found.append(Verdict(claim, race.sooner, race.numbers))
    for control in (*CONTROLS, CUT_BEST):
        lead = outcomes.lead(task, best, control, scope, end_of=best)
        claim = f"{title}: the preset is better than {control} at equal time ({clock})"
        found.append(Verdict(claim, at_least(lead, 0.0), f"by {shown(lead, 2)}"))
    lead = outcomes.lead(task, best, "fedavg", scope, end_of=best)
    claim = f"{title}: the preset is at least {AHEAD:g} better than FedAvg at equal time ({clock})"
    found.append(Verdict(claim, at_least(lead, AHEAD), f"by {shown(lead, 2)}"))
    lead = outcomes.lead_over_plateau(task, best, "fedavg", scope, share=0.5)
    claim = (
        f"{title}: in half of FedAvg's time the preset is within {POINTS_BELOW:g} of FedAvg's plateau ({clock})"
    )
    found.append(Verdict(claim, at_least(lead, -POINTS_BELOW), f"better by {shown(lead, 2)}"))
    lead = outcomes.lead(task, best, "fedavg")
    claim = f"{title}: the preset's plateau is at most {POINTS_BELOW:g} below FedAvg's ({clock})"
    found.append(Verdict(claim, at_least(lead, -POINTS_BELOW), f"better by {shown(lead, 2)}"))
    return found


def ablation(section: Section, outcomes: Outcomes, paper: Paper) -> None:  # noqa: ARG001
    parts, tried = (
        "; ".join(f"{name}: {_written(change)}" for name, change in changes.items())
        for changes in (outcomes.scale.preset, outcomes.scale.tried)
    )
    section.notes.append(
        f"The preset is the paper's FedEL with these parts: {parts or 'none yet'}. 'Lead' is how much better "
        "the preset is than the variant in that row, paired by seed: at its plateau, and when its run ends. "
        "Positive: the preset is better."
    )
    if tried:
        section.notes.append(f"Tried on top of the preset, and not taken: {tried}.")
    for task in outcomes.tasks:
        labels = [label for label in outcomes.labels(task) if label != BEST]
        rows: list[Row] = [
            {
                "variant": label,
                "plateau": final(outcomes, task, label),
                "lead": outcomes.lead(task, BEST, label) if label != BEST else None,
                "at the preset's end": outcomes.at_end_of(task, label, BEST),
                "lead then": outcomes.lead(task, BEST, label, end_of=BEST) if label != BEST else None,
                "s to 95 %": seconds_to(outcomes, task, label, TARGET, ""),
            }
            for label in (BEST, *labels)
            if outcomes.of(task, label)
        ]
        if not rows:
            continue
        title = outcomes.scale.tasks[task].title
        section.tables.append(Table(title, {"variant": 0, **dict.fromkeys(list(rows[0])[1:], 1)}, rows))
        gains = {
            label: {"lead": gain}
            for label in labels
            if label.startswith(("without ", "with "))
            and (gain := outcomes.lead(task, BEST, label)) is not None
        }
        if gains:
            unit = "points" if outcomes.scale.tasks[task].metric == "accuracy" else "%"
            drawn = pictures.bars(gains, f"lead of the preset, {unit}", 0.0)
            caption = f"{title}: how much better the preset is than without a part, or with one more."
            section.pictures.append(Picture(f"ablation-{task}", caption, drawn))
        for part in outcomes.scale.preset:
            lead = outcomes.lead(task, BEST, f"without {part}")
            claim = f"{title}: the preset is better with {part} than without"
            section.verdicts.append(Verdict(claim, at_least(lead, 0.0), f"by {shown(lead, 2)}"))


def _written(change: Mapping[str, Any], prefix: str = "") -> str:
    """A change to a job in one line.

    >>> _written({"strategy": {"start": "spread"}, "server": {"average": 0.9}})
    'strategy.start = spread, server.average = 0.9'
    """
    return ", ".join(
        _written(value, f"{prefix}{key}.") if isinstance(value, Mapping) else f"{prefix}{key} = {value}"
        for key, value in change.items()
    )
