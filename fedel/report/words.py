"""Numbers and clocks as people read them. Rounds are counted from 1 here, and from 0 in files."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedel.report.runs import StoredRun

SCOPES = {"backward": "backward passes only", "train": "whole steps", "round": "whole rounds"}
"""What the seconds of a simulation count."""


def plural(count: int, word: str) -> str:
    """
    >>> plural(1, "round"), plural(12, "round")
    ('1 round', '12 rounds')
    """
    return f"{count} {word}" + ("" if count == 1 else "s")


def percent(value: float | None, signed: bool = False) -> str:
    """
    >>> percent(0.816), percent(0.017, signed=True), percent(1.47, signed=True), percent(None)
    ('81.6 %', '+1.7 %', '+147 %', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    digits = 0 if signed and abs(value) >= 1 else 1
    return f"{100 * value:{'+' if signed else ''}.{digits}f} %"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def duration(seconds: float | None) -> str:
    """
    >>> duration(0.25), duration(95), duration(8000), duration(None)
    ('0.250 s', '1 min 35 s', '2 h 13 min', '-')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds:.3f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def clock(run: StoredRun) -> str:
    """What a second of the run is: ``virtual, backward passes only``; empty on a real clock."""
    if not run.is_virtual:
        return ""
    counts = SCOPES.get(run.scope, run.scope)
    if run.has_network and run.scope != "round":
        counts = counts.removesuffix(" only") + " and transfers"
    return f"virtual, {counts}" if counts else "virtual"


def same_clock(runs: Sequence[StoredRun]) -> bool:
    """Whether seconds of these runs may be compared."""
    return len({clock(run) for run in runs}) <= 1


def seconds_name(runs: Sequence[StoredRun], what: str = "seconds") -> str:
    """Name of an axis or a column with seconds: ``virtual seconds (backward passes only)``."""
    if not same_clock(runs):
        return f"{what} (of different clocks)"
    said = clock(runs[0]) if runs else ""
    kind, _, counts = said.partition(", ")
    return " ".join(word for word in (kind, what, counts and f"({counts})") if word)


def clocks_note(runs: Sequence[StoredRun]) -> str:
    """A sentence about the seconds of the report."""
    if not same_clock(runs):
        each = "; ".join(f"{run.method}: {clock(run) or 'measured'}" for run in runs)
        return f"The seconds of these runs are of different clocks and cannot be compared ({each})."
    said = clock(runs[0]) if runs else ""
    if not said:
        return "Seconds are measured."
    counts = said.partition(", ")[2]
    return "Seconds are virtual: computed for the simulated devices, not measured" + (
        f". They count {counts}." if counts else "."
    )
