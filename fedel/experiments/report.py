"""Writes ``report.html``, ``results.md`` and ``results.json`` from the existing runs; lists missing ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedel import config
from fedel.errors import FedelError
from fedel.experiments import pages, runner
from fedel.experiments.analyses import ablations, behaviour, deviation, headline, resources, statistics, table1
from fedel.experiments.outcomes import Outcomes
from fedel.experiments.pages import Report
from fedel.experiments.plans import EXPERIMENTS, PlannedRun, distinct
from fedel.experiments.scale import Scale
from fedel.experiments.sections import Section, Verdict
from fedel.experiments.stats import FAILS
from fedel.files import write_atomic

PAPER = Path(__file__).with_name("paper.toml")
ANALYSES: Mapping[str, Callable[[Section, Outcomes, Mapping[str, Any]], None]] = {
    "headline": headline.analyse,
    "ablation": headline.ablation,
    "table1": table1.analyse,
    "deviation": deviation.analyse,
    "composition": ablations.composition,
    "rollback": ablations.rollback,
    "beta": ablations.beta,
    "budget": ablations.budget,
    "window": ablations.window,
    "resources": resources.analyse,
    "statistics": statistics.analyse,
    "selection": behaviour.selection,
    "importance": behaviour.importance,
    "devices": behaviour.devices,
}


def make(
    scale: Scale, wanted: Mapping[str, Sequence[PlannedRun]], place: Path, failed: Mapping[str, str]
) -> Report:
    """Analyse all existing runs."""
    paper = config.read(PAPER)
    sections = []
    for name, runs in wanted.items():
        section = Section(name, EXPERIMENTS[name].title)
        outcomes = Outcomes(scale, runs, place)
        section.missing += _grouped(outcomes.missing)
        if outcomes.found:
            try:
                ANALYSES[name](section, outcomes, paper.get(name, {}))
            except FedelError as error:
                section.notes.append(f"This section is not complete: {error}")
        section.verdicts = [_explained(verdict, scale.reasons) for verdict in section.verdicts]
        sections.append(section)
    runs = distinct(run for planned in wanted.values() for run in planned)
    return Report(scale, sections, runs, {run.name: runner.state(run, place) for run in runs}, failed)


def _explained(verdict: Verdict, reasons: Mapping[str, str]) -> Verdict:
    """With the reason why the claim does not hold, if one is known."""
    why = next((why for words, why in reasons.items() if words in verdict.claim), "")
    if verdict.answer != FAILS or not why:
        return verdict
    return dataclasses.replace(verdict, answer=dataclasses.replace(FAILS, reason=why))


def _grouped(runs: Sequence[PlannedRun]) -> list[str]:
    seeds: dict[str, list[str]] = {}
    for run in runs:
        seeds.setdefault(f"{run.task} {run.label}", []).append(str(run.seed))
    return [f"{name}, seed {', '.join(numbers)}" for name, numbers in seeds.items()]


def write(report: Report, out: Path, markdown: Path | None = None) -> list[Path]:
    """Write page, Markdown and numbers (JSON) into ``out``; optionally the Markdown to another place too."""
    page, data = out / "report.html", out / "results.json"
    write_atomic(page, pages.page(report).encode())
    write_atomic(data, (json.dumps(as_json(report), indent=1) + "\n").encode())
    texts = [out / "results.md", *([markdown] if markdown else [])]
    for text in texts:
        pictures = text.parent / "img" / text.stem
        for picture in (p for section in report.sections for p in section.pictures):
            write_atomic(pictures / f"{picture.name}.svg", picture.svg.encode())
        write_atomic(text, pages.markdown(report, f"img/{text.stem}").encode())
    return [page, data, *texts]


def as_json(report: Report) -> dict[str, Any]:
    """All numbers, without the pictures; a number that is not finite is null."""
    sections = []
    for section in report.sections:
        table = {key: value for key, value in dataclasses.asdict(section).items() if key != "pictures"}
        verdicts = [{"claim": v.claim, "answer": str(v.answer), "numbers": v.numbers} for v in section.verdicts]
        sections.append({**table, "verdicts": verdicts})
    runs = [
        {"name": r.name, "task": r.task, "seed": r.seed, "state": report.states[r.name], "job": r.table}
        for r in report.runs
    ]
    found = {"scale": report.scale.name, "sections": sections, "runs": runs, "failed": dict(report.failed)}
    made: dict[str, Any] = json.loads(json.dumps(found), parse_constant=lambda _: None)
    return made
