"""How fast the planner takes a client to be: what its profile says, corrected by what was measured.

Where a run keeps its pace by the clock, measured seconds correct the profile from round to round. Where it
keeps to its plan they do not, or a run on a busy machine could not be repeated. T_th follows the fastest one,
so one profile that is far too fast would take the work of all others away: what cannot be true is not believed.
A client that says it is slow gets little work, which harms nobody else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedel.core.timing import full_step
from fedel.roles.run_state import Member, TaskResult
from fedel.types import AS_PROFILED, ClientView, Speed

FACTOR = 3.0
"""How far a profile may lie below the median of its device type, and measured seconds below predicted ones."""
MIN_ALIKE = 3
"""Clients of one type from which on their median says something."""
MAX_SLOWNESS = 1e6
MIN_TRANSFER = 100_000
"""Bytes from which on a transfer says how fast a link is, and not only how far away the server is."""


def believed(members: Sequence[Member], speeds: Mapping[str, Speed]) -> list[ClientView]:
    """The members as the planner sees them, in their order, bound by the median of their device type.

    ``speeds`` is what was learned of each client (``learned``); empty where a run keeps to its plan.
    """
    known = _with_links(speeds)
    slow = {member.client: known.get(member.client, AS_PROFILED).slowness for member in members}
    seconds = {m.client: full_step(m.profile).total("train") * slow[m.client] for m in members}
    alike: dict[str, list[float]] = {}
    for member in members:
        if member.device_type:
            alike.setdefault(member.device_type, []).append(seconds[member.client])
    medians = {kind: statistics.median(times) for kind, times in alike.items() if len(times) >= MIN_ALIKE}
    views = []
    for member in members:
        client, least = member.client, medians.get(member.device_type, 0.0) / FACTOR
        slowness = slow[client] * max(1.0, least / seconds[client])
        views.append(_slowed(member, slowness, known.get(client, AS_PROFILED)))
    return views


def _with_links(speeds: Mapping[str, Speed]) -> dict[str, Speed]:
    """A client that has sent too little to measure its link by is taken to have the median of the others'.

    Otherwise its first large window would be planned as if bytes took no time.
    """
    down = [speed.down_rate for speed in speeds.values() if speed.down_rate]
    up = [speed.up_rate for speed in speeds.values() if speed.up_rate]
    usual_down, usual_up = (statistics.median(rates) if rates else 0.0 for rates in (down, up))
    return {
        client: replace(speed, down_rate=speed.down_rate or usual_down, up_rate=speed.up_rate or usual_up)
        for client, speed in speeds.items()
    }


def learned(before: Speed, result: TaskResult) -> Speed:
    """What a client's last round adds to what is known of its speed.

    A single round says little on a machine that others use too, so each counts half, except the first one.

    >>> from fedel.types import Report, StepCost
    >>> report = Report("a", 0, 10, 4, 4.0, 0.5, cost=StepCost(0.1, 0.4), train_seconds=4.0, step_seconds=1.0)
    >>> phases = {"download": 2.0, "train": 5.0, "upload": 1.0, "wait": 0.5}
    >>> first = learned(AS_PROFILED, TaskResult(report, bytes_up=100_000, bytes_down=400_000, phases=phases))
    >>> first.slowness, first.down_rate, first.up_rate, first.other_seconds, first.wait_seconds
    (2.0, 200000.0, 100000.0, 1.0, 0.5)
    >>> as_predicted = replace(report, cost=StepCost(0.2, 0.8))
    >>> learned(first, TaskResult(as_predicted)).slowness
    2.0
    """
    report, phases, is_first = result.report, result.phases, before == AS_PROFILED
    steps = report.batches * report.step_seconds
    other = phases["train"] - report.probe_seconds - steps if phases.get("train") else before.other_seconds
    return Speed(
        slowness=_corrected(before.slowness, report.step_seconds, report.cost.total("train"), is_first),
        probe_slowness=_corrected(
            before.probe_slowness, report.probe_seconds, report.probe.total("train"), is_first
        ),
        down_rate=_rate(before.down_rate, result.bytes_down, phases.get("download", 0.0)),
        up_rate=_rate(before.up_rate, result.bytes_up, phases.get("upload", 0.0)),
        other_seconds=_mixed(before.other_seconds, max(0.0, other)),
        wait_seconds=_mixed(before.wait_seconds, phases.get("wait", before.wait_seconds)),
    )


def _corrected(slowness: float, measured: float, predicted: float, is_first: bool) -> float:
    """``predicted`` has the old slowness in it."""
    if measured <= 0 or predicted <= 0:
        return slowness
    ratio = measured / predicted
    return min(max(slowness * (ratio if is_first else math.sqrt(ratio)), 1 / FACTOR), MAX_SLOWNESS)


def _rate(before: float, num_bytes: int, seconds: float) -> float:
    """Bytes per second; what is too small to measure a link by changes nothing."""
    if num_bytes < MIN_TRANSFER or seconds <= 0:
        return before
    return num_bytes / seconds if not before else 1 / _mixed(1 / before, seconds / num_bytes)


def _mixed(before: float, now: float) -> float:
    return (before + now) / 2 if before else now


def _slowed(member: Member, slowness: float, speed: Speed) -> ClientView:
    if slowness == 1:
        return replace(member.view, speed=speed)
    profile = member.profile.scaled(min(slowness, MAX_SLOWNESS), member.profile.device)
    return replace(member.view, profile=profile, speed=speed)
