"""Curves that may be compared: means over time, and targets that are held. Single tests jump."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

SMOOTH = 0.1
"""A point of a smoothed curve is the mean of the tests in this last share of the time so far. It is no number
of tests: runs with long rounds have few, and a mean over many of their rounds would hold them back."""
IN_A_ROW = 4
"""Tests in the mean that stands for one run alone."""
HOLD = 3
"""A target is reached at the first of this many points in a row that are as good as it."""
LATE, NUM_LATE = 0.25, 100
"""The last part of a time, as a share of it, and the steps in which it is looked at."""
AT_CHANCE = 1.25
"""A model that is not better than this many times 1 / classes has not learned."""

Curve = Sequence[tuple[float, float]]
"""Seconds and value of every test. Higher is better; negate a value of which less is better."""


def smoothed(tests: Curve) -> list[tuple[float, float]]:
    """
    >>> smoothed([(1.0, 0.0), (19.5, 1.0), (20.0, 2.0)])
    [(1.0, 0.0), (19.5, 1.0), (20.0, 1.5)]
    """
    points = []
    for i, (now, value) in enumerate(tests):
        late = [before for seconds, before in tests[:i] if seconds > (1 - SMOOTH) * now]
        points.append((now, statistics.fmean([*late, value])))
    return points


def in_a_row(values: Sequence[float]) -> list[float]:
    """Each test averaged with those just before it; the first are means of the few that there are.

    >>> in_a_row([0.0, 1.0, 2.0, 3.0, 4.0])
    [0.0, 0.5, 1.0, 1.5, 2.5]
    """
    return [statistics.fmean(values[max(0, i + 1 - IN_A_ROW) : i + 1]) for i in range(len(values))]


def late_mean(tests: Curve, seconds: float) -> float | None:
    """The mean over the last quarter of a time, straight lines between tests; ``None`` before the first test.

    Runs with long rounds have few tests: a mean of the last four would reach back to where they began.

    >>> late_mean([(0.0, 0.0), (4.0, 0.4)], 4.0), late_mean([(1.0, 0.25)], 0.5)
    (0.35, None)
    """
    times = [seconds * (1 - LATE * i / NUM_LATE) for i in range(NUM_LATE + 1)]
    values = [value for value in (_between(tests, time) for time in times) if value is not None]
    return round(statistics.fmean(values), 12) if values else None


def _between(tests: Curve, seconds: float) -> float | None:
    if not tests or seconds < tests[0][0]:
        return None
    for (s0, v0), (s1, v1) in itertools.pairwise(tests):
        if s0 <= seconds < s1:
            return v0 + (v1 - v0) * (seconds - s0) / (s1 - s0)
    return tests[-1][1]


def seconds_to(curve: Curve, target: float, hold: int = HOLD) -> float | None:
    """Seconds until the curve was as good as the target and stayed so; ``None`` if it never did.

    >>> spike, held = [0.1, 0.9, 0.1, 0.1], [0.1, 0.8, 0.9, 0.8]
    >>> [seconds_to(list(enumerate(values)), 0.8) for values in (spike, held)]
    [None, 1]
    """
    return next((s for s, lowest in _stretches(curve, hold) if lowest >= target), None)


def highest_held(curve: Curve, hold: int = HOLD) -> float | None:
    """The highest target that the curve reaches; ``None`` if it has fewer than ``hold`` points.

    >>> highest_held(list(enumerate([0.1, 0.9, 0.3, 0.4, 0.5])))
    0.3
    """
    return max((lowest for _, lowest in _stretches(curve, hold)), default=None)


def _stretches(curve: Curve, hold: int) -> list[tuple[float, float]]:
    """Of every ``hold`` points in a row, the time of the first and the lowest value."""
    return [(curve[i][0], min(value for _, value in curve[i : i + hold])) for i in range(len(curve) - hold + 1)]


def is_at_chance(accuracy: float, num_classes: int) -> bool:
    """Whether guessing is about as good.

    >>> is_at_chance(0.12, 10), is_at_chance(0.2, 10)
    (True, False)
    """
    return accuracy <= AT_CHANCE / num_classes
