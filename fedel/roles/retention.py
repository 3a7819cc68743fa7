"""Which runs that are over are deleted, by their age and their number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DAY_SECONDS = 86_400.0
GRACE_SECONDS = 3_600.0
"""So long a run stays in any case: somebody may be fetching its model."""


@dataclass(frozen=True)
class Ended:
    """A run that is over."""

    run: str
    ended_at: float
    """Unix seconds."""


def too_old(runs: Iterable[Ended], now: float, seconds: float) -> list[str]:
    """Those that ended longer ago than this, the oldest first."""
    return [each.run for each in _oldest_first(runs) if now - each.ended_at > seconds]


def to_delete(runs: Iterable[Ended], now: float, keep_days: float, keep_number: int) -> list[str]:
    """Those beyond one of the limits, the oldest first; a limit of 0 is none. Just ended runs stay."""
    known = _oldest_first(runs)
    surplus = len(known) - keep_number if keep_number else 0
    gone = {each.run for each in known[: max(0, surplus)]}
    if keep_days:
        gone |= set(too_old(known, now, keep_days * DAY_SECONDS))
    return [each.run for each in known if each.run in gone and now - each.ended_at > GRACE_SECONDS]


def _oldest_first(runs: Iterable[Ended]) -> list[Ended]:
    return sorted(runs, key=lambda each: (each.ended_at, each.run))
