"""Writes the sections as a self-contained page, and as Markdown."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from fedel import config
from fedel.experiments.plans import PlannedRun
from fedel.experiments.runner import DONE
from fedel.experiments.scale import Scale
from fedel.experiments.sections import Picture, Section, Table
from fedel.experiments.stats import ANSWERS, Answer

OPENING = "headline"
"""The experiment whose first picture and opening table begin the page."""
_STYLE = "details { margin: .2rem 0; } .claims td { white-space: normal; text-align: left; }"


@dataclass(frozen=True)
class Report:
    scale: Scale
    sections: Sequence[Section]
    runs: Sequence[PlannedRun]
    states: Mapping[str, str]
    """By the name of the run."""
    failed: Mapping[str, str]

    @property
    def num_done(self) -> int:
        return sum(state == DONE for state in self.states.values())


def _headline(report: Report) -> list[str]:
    done = f"{report.num_done} of {len(report.runs)} runs are done."
    return [
        report.scale.note,
        done + ("" if report.num_done == len(report.runs) else " Missing runs are listed."),
    ]


def _opening(report: Report) -> tuple[list[Picture], list[Table]]:
    """The picture and the table that say most, if their runs are there."""
    first = [section for section in report.sections if section.name == OPENING]
    drawn = [picture for section in first for picture in section.pictures]
    return drawn[:1], [section.opening for section in first if section.opening]


def _tally(report: Report) -> tuple[list[str], list[list[str]]]:
    """How many claims of each section hold; the rest of the page shows why."""
    counts = [
        (section.title, Counter(verdict.answer for verdict in section.verdicts))
        for section in report.sections
        if section.verdicts
    ]
    counts.append(("all", sum((found for _, found in counts), Counter[Answer]())))
    rows = [[title, *(str(found[answer]) for answer in ANSWERS)] for title, found in counts]
    return ["claims on", *map(str, ANSWERS)], rows


def page(report: Report) -> str:
    style = files("fedel.report").joinpath("report.css").read_text(encoding="utf-8")
    title = f"FedEL and the paper, scale {report.scale.name}"
    parts = [f"<h1>{title}</h1>", *(f"<p>{html.escape(line)}</p>" for line in _headline(report))]
    drawn, tables = _opening(report)
    parts += [f"<figure>{p.svg}</figure><p class=note>{html.escape(p.caption)}</p>" for p in drawn]
    for table in tables:
        parts.append(_html_table(list(table.columns), table.cells()))
        parts.append(f"<p class=note>{html.escape(table.note)}</p>")
    parts.append(_html_table(*_tally(report)))
    for section in report.sections:
        parts.append(f"<h2 id={section.name}>{html.escape(section.title)}</h2>")
        parts += [f"<p class=note>{html.escape(note)}</p>" for note in section.notes]
        if section.verdicts:
            parts.append(f"<div class=claims>{_html_table(*_verdicts(section))}</div>")
        for table in section.tables:
            parts.append(f"<h3>{html.escape(table.title)}</h3>")
            parts.append(_html_table(list(table.columns), table.cells()))
            parts.append(f"<p class=note>{html.escape(table.note)}</p>" if table.note else "")
        parts += [
            f"<figure>{picture.svg}</figure><p class=note>{html.escape(picture.caption)}</p>"
            for picture in section.pictures
        ]
        if section.missing:
            parts.append(f"<p><b>Missing:</b> {html.escape('; '.join(section.missing))}</p>")
    parts += [
        f"<p><b>Failed:</b> {html.escape(name)}: {html.escape(why)}</p>" for name, why in report.failed.items()
    ]
    parts.append("<h2>Runs</h2>")
    parts += [
        f"<details><summary>{html.escape(run.name)}, seed {run.seed}: {report.states[run.name]}</summary>"
        f"<pre>{html.escape(config.write(run.table))}</pre></details>"
        for run in report.runs
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{style}{_STYLE}</style>{''.join(parts)}</html>"
    )


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _verdicts(section: Section) -> tuple[list[str], list[list[str]]]:
    return ["claim", "verdict", "numbers"], [[v.claim, str(v.answer), v.numbers] for v in section.verdicts]


def markdown(report: Report, pictures: str) -> str:
    lines = [f"# FedEL and the paper, scale `{report.scale.name}`", ""]
    drawn, tables = _opening(report)
    lines += [f"![{p.caption}]({pictures}/{p.name}.svg)\n\n{p.caption}\n" for p in drawn]
    for table in tables:
        lines += [*_table_lines(table), "", f"{table.note}\n"]
    lines += [
        "Made by `fedel experiment`; `docs/experiments.md` explains how, and what the numbers mean. "
        "`docs/LOG.md` says what we found about claims that do not hold.",
        "",
        *(f"{line}\n" for line in _headline(report)),
        *_markdown_table(*_tally(report)),
        "",
    ]
    for section in report.sections:
        lines += [f"## {section.title}", "", *(f"{note}\n" for note in section.notes)]
        if section.verdicts:
            lines += [*_markdown_table(*_verdicts(section)), ""]
        for table in section.tables:
            lines += [f"**{table.title}**", "", *_table_lines(table), ""]
            lines += [f"{table.note}\n"] if table.note else []
        lines += [f"![{p.caption}]({pictures}/{p.name}.svg)\n" for p in section.pictures]
        lines += [f"Missing: {'; '.join(section.missing)}.\n"] if section.missing else []
    lines += [f"Failed: `{name}`: {why}\n" for name, why in report.failed.items()]
    lines += [
        "## Runs",
        "",
        *_markdown_table(["task", "method", "seeds", "rounds", "hashes"], _run_rows(report)),
    ]
    return "\n".join(lines) + "\n"


def _run_rows(report: Report) -> list[list[str]]:
    """Runs that differ only in their seed share a row."""
    rows: dict[tuple[str, str, int], list[PlannedRun]] = {}
    for run in report.runs:
        rows.setdefault((run.task, run.label, run.num_rounds), []).append(run)
    return [
        [
            task,
            label,
            ", ".join(str(run.seed) for run in runs),
            str(num_rounds),
            ", ".join(run.name.rpartition("-")[2] for run in runs),
        ]
        for (task, label, num_rounds), runs in rows.items()
    ]


def _table_lines(table: Table) -> list[str]:
    return _markdown_table(list(table.columns), table.cells())


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]
