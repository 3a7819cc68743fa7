"""The results of an experiment: tables, verdicts and pictures, before they become a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedel.experiments.stats import Answer, Estimate, Factor

Row = Mapping[str, Any]
"""Per column: text, a number, an ``Estimate``, a ``Factor``, or None if unknown."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: Mapping[str, int]
    """Heading -> digits after the decimal point."""
    rows: list[Row]
    note: str = ""

    def cells(self) -> list[list[str]]:
        return [[shown(row.get(head), digits) for head, digits in self.columns.items()] for row in self.rows]


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, or a goal of this reproduction, compared with our numbers."""

    claim: str
    answer: Answer
    figures: str = ""

    @property
    def numbers(self) -> str:
        """Our figures, and why they do not decide, or decide against the claim."""
        return "; ".join(filter(None, (self.figures, self.answer.reason)))


@dataclass(frozen=True)
class Picture:
    name: str
    caption: str
    svg: str


@dataclass
class Section:
    name: str
    title: str
    notes: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Runs that are not done yet."""
    opening: Table | None = None
    """What a reader in a hurry should see of it."""


def shown(value: Any, digits: int = 1) -> str:
    """A cell.

    >>> shown(Estimate(56.13, 1.25, 3)), shown(None), shown(2.0, 2), shown("fedel"), shown(float("inf"))
    ('56.1 ± 1.2', '-', '2.00', 'fedel', 'never')
    """
    if value is None or value != value:  # not a number
        return "-"
    if isinstance(value, Estimate):
        half = "" if value.half is None else f" ± {value.half:.{digits}f}"
        return shown(value.mean, digits) + half
    if isinstance(value, Factor):
        between = "" if value.logs.half is None else f" ({value.low:.{digits}f} to {value.high:.{digits}f})"
        return shown(value.mean, digits) + between
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "never" if value == float("inf") else f"{value:,.{digits}f}"
    return str(value)
