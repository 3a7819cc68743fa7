"""What a section of the benchmark is: a module of ``fedel.bench.sections`` with a ``SECTION``.

A section yields rows. A row is plain JSON: ``what`` names it (once per section), the other keys are its
numbers. The runner stores each row when it comes and adds ``section``, ``load_before`` and ``load_after``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedel.errors import ConfigError

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]
Say = Callable[[str], None]
"""Shows a line of progress."""


@dataclass(frozen=True)
class Options:
    """What to measure; a section uses what concerns it."""

    quick: bool = False
    """Less than three minutes for all sections: no other systems, few rounds."""
    sizes: tuple[str, ...] = ("S", "M", "L")
    """Names of workloads, see ``workloads.py``."""
    clients: tuple[int, ...] = (2, 10, 50, 200)
    systems: tuple[str, ...] = ()
    """Names of the systems to compare; empty for all."""
    turns: int = 2
    """How often each measurement is done, in turns with those it is compared with."""
    seconds: float = 300.0
    """Time limit of one measurement of one system."""
    folder: Path = field(default=Path(), compare=False)
    """Exists and is empty, for files of the measurement; removed afterwards."""
    rows: Rows = field(default=(), compare=False)
    """What this section measured before it was interrupted."""

    @property
    def done(self) -> frozenset[str]:
        """``what`` of these rows. A section may leave them out; a row that comes again replaces the old one."""
        return frozenset(row["what"] for row in self.rows)


@dataclass(frozen=True)
class Goal:
    """A line of the table at the top of the page."""

    question: str
    goal: str
    measured: str
    met: bool | None = None
    """None: it is not known, or it is not a question of yes and no."""


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    place: int
    """Sections are measured and shown in this order, the smallest first."""
    measure: Callable[[Options, Say], Iterator[Row]]
    show: Callable[[Rows], list[str]]
    """The rows as lines of Markdown; headings from ``###`` on."""
    pictures: Callable[[Rows], Mapping[str, str]] = lambda _: {}
    """SVG text by name; the page shows them below the lines. The name is part of a file name."""
    goals: Callable[[Rows], list[Goal]] = lambda _: []
    ratios: Callable[[Rows], Mapping[str, float]] = lambda _: {}
    """Ratios of figures of this run, smaller is better: compared with the stored baseline."""
    quick: bool = False
    """It is part of ``--quick``."""


def sections(names: Sequence[str] = (), *, quick: bool = False) -> list[Section]:
    """The sections of these names, or all; ``quick`` leaves out those that take long."""
    package = importlib.import_module("fedel.bench.sections")
    modules = [
        importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)
    ]
    found = sorted((m.SECTION for m in modules if hasattr(m, "SECTION")), key=lambda s: (s.place, s.name))
    if unknown := set(names) - {section.name for section in found}:
        known = ", ".join(section.name for section in found)
        raise ConfigError(f"no section is named '{min(unknown)}'; there are: {known}")
    return [s for s in found if (s.name in names if names else s.quick or not quick)]
