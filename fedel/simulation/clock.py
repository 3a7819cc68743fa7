"""The virtual clock: what a client's round takes, and when a round closes (algorithms 19.3, A3, A30).

Seconds come from timing profiles. Two clocks run: ``backward`` counts the backward pass alone, as the paper's
simulation does, ``train`` the whole step. One of them, the scope of the run, decides; both are written down.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fedel.core.timing import fits
from fedel.types import Report


@dataclass(frozen=True)
class Spent:
    """Virtual seconds of one client in one round."""

    backward_seconds: float
    train_seconds: float
    network_seconds: float = 0.0

    def training(self, scope: str) -> float:
        return self.backward_seconds if scope == "backward" else self.train_seconds

    def total(self, scope: str) -> float:
        return self.training(scope) + self.network_seconds


def spent(report: Report, drift: float = 1.0, network_seconds: float = 0.0) -> Spent:
    """Steps as the strategy predicts them, and the probe, on a device ``drift`` times slower than it was."""

    def seconds(scope: str) -> float:
        return drift * (report.num_steps * report.cost.total(scope) + report.probe.total(scope))

    return Spent(seconds("backward"), seconds("train"), network_seconds)


@dataclass(frozen=True)
class Closing:
    """How a round ended."""

    seconds: float
    counted: tuple[str, ...]
    """Clients in the order in which they came back."""
    late: tuple[str, ...]


def in_time(seconds: float, deadline_seconds: float) -> bool:
    return fits(seconds, deadline_seconds)


def close(
    arrivals: Iterable[tuple[float, str]],
    enough: Callable[[int], bool],
    deadline_seconds: float,
    min_reports: int = 1,
) -> Closing:
    """Play a round: clients come back one by one until there are enough of them, or the deadline passes.

    A round with fewer than ``min_reports`` at its deadline is held open for the next to come. One that waits
    for somebody who never comes lasts until the deadline.

    >>> close([(3.0, "slow"), (1.0, "fast")], lambda count: count >= 2, deadline_seconds=8.0)
    Closing(seconds=3.0, counted=('fast', 'slow'), late=())
    >>> close([(9.0, "slow"), (1.0, "fast")], lambda count: count >= 2, deadline_seconds=8.0)
    Closing(seconds=8.0, counted=('fast',), late=('slow',))
    """
    coming = list(arrivals)
    heapq.heapify(coming)
    now = 0.0
    counted: list[str] = []
    while coming and not enough(len(counted)):
        seconds, client = coming[0]
        if not in_time(seconds, deadline_seconds) and len(counted) >= min_reports:
            break
        heapq.heappop(coming)
        now = seconds
        counted.append(client)
    if not enough(len(counted)):
        now = max(now, deadline_seconds)
    return Closing(now, tuple(counted), tuple(client for _, client in sorted(coming)))
