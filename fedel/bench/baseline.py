"""Ratios of an earlier run, to see what got slower. It is information: nobody's build fails because of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedel.bench.page import of, table
from fedel.bench.section import Row, Section

FILE = Path(__file__).with_name("baseline.json")
MARGIN = 1.3
"""A ratio that is this many times the stored one is named; a busy machine moves them by less."""


def ratios(rows: Sequence[Row], known: Sequence[Section]) -> dict[str, float]:
    found: dict[str, float] = {}
    for section in known:
        if own := of(rows, section.name):
            found |= {f"{section.name}: {name}": value for name, value in section.ratios(own).items()}
    return found


def read(file: Path = FILE) -> dict[str, float]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def write(now: Mapping[str, float], file: Path = FILE) -> None:
    rounded = {name: float(f"{value:.3g}") for name, value in now.items()}
    file.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")


def compare(now: Mapping[str, float], before: Mapping[str, float], margin: float = MARGIN) -> list[str]:
    """A table of all ratios, and a line about those that got worse."""
    lines, slower = [], []
    for name, value in now.items():
        old = before.get(name)
        change = value / old if old else None
        word = (
            ""
            if change is None
            else "slower"
            if change > margin
            else "faster"
            if change < 1 / margin
            else "same"
        )
        slower += [name] if word == "slower" else []
        past = "" if old is None else f"{old:.2f}"
        lines.append([name, past, f"{value:.2f}", "" if change is None else f"{change:.2f}", word])
    said = f"{len(slower)} of {len(lines)} ratios are more than {margin:g} times the stored ones"
    end = f"{said}: {'; '.join(slower)}" if slower else said
    return [*table(["ratio", "stored", "now", "now / stored", ""], lines), "", end]


def _word(change: float, margin: float) -> str:
    return "slower" if change > margin else "faster" if change < 1 / margin else "same"
