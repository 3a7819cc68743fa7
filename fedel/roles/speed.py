"""How fast the planner believes a client to be: what its profile says, unless that cannot be true.

T_th follows the fastest client, so one profile that is far too fast would take the work of all others away.
Only that direction is corrected: a client that says it is slow gets little work, which harms nobody else.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedel.core.timing import full_step
from fedel.roles.run_state import Member
from fedel.types import ClientView, Report

FACTOR = 3.0
"""How far a profile may lie below the median of its device type, and measured seconds above predicted ones."""
MIN_ALIKE = 3
"""Clients of one type from which on their median says something."""
MAX_SLOWNESS = 1e6


def believed(members: Sequence[Member], reports: Mapping[str, Report]) -> list[ClientView]:
    """The members as the planner sees them, in their order. ``reports`` are the last ones that counted.

    Bounds come from clients of the same type and from the seconds that the client measured. What is to learn
    more from measured seconds belongs here: the planner takes whatever profile this gives it.
    """
    seconds = {member.client: full_step(member.profile).total("train") for member in members}
    alike: dict[str, list[float]] = {}
    for member in members:
        if member.device_type:
            alike.setdefault(member.device_type, []).append(seconds[member.client])
    medians = {kind: statistics.median(times) for kind, times in alike.items() if len(times) >= MIN_ALIKE}
    views = []
    for member in members:
        least = medians.get(member.device_type, 0.0) / FACTOR
        slowness = max(least / seconds[member.client], measured_slowness(reports.get(member.client)))
        views.append(_slowed(member, slowness))
    return views


def measured_slowness(report: Report | None) -> float:
    """How many times longer a client trained than it had predicted, where that is out of all proportion.

    >>> from fedel.types import StepCost
    >>> report = Report("a", 0, 10, 4, 4.0, 0.5, cost=StepCost(0.1, 0.2), train_seconds=12.0)
    >>> round(measured_slowness(report), 6)
    10.0
    >>> measured_slowness(replace(report, train_seconds=2.0))
    1.0
    """
    if report is None:
        return 1.0
    predicted = report.cost.total("train") * report.num_steps + report.probe.total("train")
    if predicted <= 0 or report.train_seconds <= FACTOR * predicted:
        return 1.0
    return report.train_seconds / predicted


def _slowed(member: Member, slowness: float) -> ClientView:
    if slowness <= 1:
        return member.view
    profile = member.profile.scaled(min(slowness, MAX_SLOWNESS), member.profile.device)
    return replace(member.view, profile=profile)
