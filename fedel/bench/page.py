"""The page of a run of the benchmark: Markdown with pictures, from its rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fedel.bench.runner import END, MACHINE
from fedel.bench.section import Goal, Row, Section

INTRODUCTION = """\
# Performance

What FedEL costs beside other systems, and beside the least that the machine can do with the same bytes. All
figures are from `fedel bench` (`make bench`), which also wrote this page. Compare the figures of a table with
each other, not with those of another machine."""
NOTES = "## Notes"
"""From this heading on, a page is written by people, and is kept when it is written again."""


def write(rows: Sequence[Row], known: Sequence[Section], file: Path) -> None:
    """The page, and its pictures in ``img`` beside it; notes that it had are kept."""
    images = file.parent / "img" / "performance"
    lines = [INTRODUCTION, "", *_machine(rows), "", *_goals(rows, known)]
    for section in known:
        own = of(rows, section.name)
        if not own:
            continue
        lines += ["", f"## {section.title}", "", *section.show(own)]
        for name, svg in section.pictures(own).items():
            images.mkdir(parents=True, exist_ok=True)
            picture = images / f"{section.name}-{name}.svg"
            picture.write_text(svg, encoding="utf-8")
            lines += ["", f"![{section.title}: {name}]({picture.relative_to(file.parent)})"]
    old = file.read_text(encoding="utf-8") if file.exists() else ""
    _, heading, notes = old.partition(f"\n{NOTES}\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n" + heading + notes, encoding="utf-8")


def of(rows: Iterable[Row], section: str) -> list[Row]:
    return [row for row in rows if row["section"] == section]


def table(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """A table in Markdown.

    >>> table(["server", "s"], [["ours", 2.5]])
    ['| server | s |', '|---|---|', '| ours | 2.5 |']
    """
    return [_line(heads), "|" + "---|" * len(heads), *map(_line, lines)]


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _machine(rows: Sequence[Row]) -> list[str]:
    marks = [row for row in rows if row["section"] in (MACHINE, END)]
    if not marks:
        return []
    about = next(row for row in marks if row["section"] == MACHINE)
    loads = [row[key] for row in rows for key in ("load", "load_before", "load_after") if key in row]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return [
        f"The machine: {about['cores']} cores ({about['model']}), {about['memory_bytes'] / 1e9:.0f} GB, "
        f"{about['system']}, Python {about['python']}, {versions}. "
        f"From {marks[0]['at'][:16]} to {marks[-1]['at'][:16]} UTC. "
        f"Its load before and after the measurements was {min(loads):.1f} to {max(loads):.1f}; "
        "what the benchmark itself does is part of that."
    ]


def _goals(rows: Sequence[Row], known: Sequence[Section]) -> list[str]:
    goals = [goal for section in known if (own := of(rows, section.name)) for goal in section.goals(own)]
    if not goals:
        return []
    cells = [[goal.question, goal.goal, goal.measured, _word(goal)] for goal in goals]
    return ["## Goals", "", *table(["question", "goal", "measured", "reached"], cells)]


def _word(goal: Goal) -> str:
    return "" if goal.met is None else "yes" if goal.met else "**no**"
