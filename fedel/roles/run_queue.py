"""Which runs of a coordinator may start, and behind which others the rest wait."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedel.roles.run_state import QUEUED, RUNNING, STOPPING, WAITING

ACTIVE = (WAITING, RUNNING, STOPPING)
"""Phases of the runs that count against the limit. A run that is paused leaves its place to others."""
MAX_NAMED = 3


@dataclass(frozen=True)
class Place:
    """A run in the queue, or one that others wait for."""

    run: str
    phase: str
    priority: int = 0
    created_at: float = 0.0


def to_start(runs: Iterable[Place], max_active: int) -> list[str]:
    """The queued runs whose turn it is: the highest priority first, then the oldest; 0 sets no limit."""
    known = list(runs)
    queue = _queue(known)
    free = max_active - len(_active(known)) if max_active else len(queue)
    return [place.run for place in queue[: max(0, free)]]


def behind(runs: Iterable[Place], max_active: int) -> dict[str, str]:
    """By queued run: what it waits for, for people."""
    known = list(runs)
    active, queue = _active(known), _queue(known)
    limit = f"max_active_runs = {max_active}"
    return {
        place.run: f"waits in the queue behind {_named([*active, *queue[:position]])} ({limit})"
        for position, place in enumerate(queue)
    }


def _active(runs: list[Place]) -> list[Place]:
    return sorted((place for place in runs if place.phase in ACTIVE), key=lambda place: place.created_at)


def _queue(runs: list[Place]) -> list[Place]:
    queued = (place for place in runs if place.phase == QUEUED)
    return sorted(queued, key=lambda place: (-place.priority, place.created_at, place.run))


def _named(places: list[Place]) -> str:
    told = [f"{place.run} ({_said(place)})" for place in places[:MAX_NAMED]]
    more = [f"{len(places) - MAX_NAMED} more"] if len(places) > MAX_NAMED else []
    return ", ".join([*told, *more]) or "nothing: it starts now"


def _said(place: Place) -> str:
    if place.phase != QUEUED:
        return place.phase
    return f"queued, priority {place.priority}" if place.priority else QUEUED
