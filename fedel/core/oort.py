"""Oort's guided choice of clients (Lai et al., 2021; algorithms 7): much to learn from, not too slow, some new.

Rounds are counted from 1 here, as the staleness bonus divides by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

POOL = 5
"""New clients are drawn from this many times as many of the most promising ones."""


def utility(loss_square: float, num_samples: int, trained_samples: int) -> float:
    """How much there is to learn from a client: its loss, on as many samples as it went through.

    >>> utility(4.0, num_samples=100, trained_samples=30)
    60.0
    """
    return math.sqrt(loss_square) * min(num_samples, trained_samples)


def preferred_seconds(durations: Sequence[float], percent: float) -> float:
    """T_pref: rounds as long as this go unpunished; the given percentile of all known durations.

    >>> preferred_seconds([40, 10, 30, 20], percent=50)
    30
    >>> preferred_seconds([40, 10, 30, 20], percent=100)
    inf
    """
    if percent >= 100 or not durations:
        return math.inf
    return sorted(durations)[min(int(len(durations) * percent / 100), len(durations) - 1)]


def penalty(seconds: float, preferred: float, exponent: float) -> float:
    """What is left of a slow client's score.

    >>> penalty(20, preferred=10, exponent=2), penalty(5, preferred=10, exponent=2)
    (0.25, 1.0)
    """
    return (preferred / seconds) ** exponent if seconds > preferred else 1.0


def scores(
    utilities: Mapping[str, float],
    last_rounds: Mapping[str, int],
    durations: Mapping[str, float],
    current_round: int,
    preferred: float,
    exponent: float,
    clip: float,
) -> dict[str, float]:
    """The score of every client that ``utilities`` knows: utility and staleness, less the penalty.

    Utilities above the share ``clip`` of them count as that one, so that outliers do not win every round.
    """
    if not utilities:
        return {}
    ordered = sorted(utilities.values())
    cap = ordered[min(int(len(ordered) * clip), len(ordered) - 1)]
    least = ordered[0] * 0.999
    spread = max(ordered[-1] - least, 1e-4)
    found = {}
    for name, value in utilities.items():
        stale = math.sqrt(0.1 * math.log(current_round) / last_rounds[name])
        score = (min(value, cap) - least) / spread + stale
        found[name] = score * penalty(durations[name], preferred, exponent)
    return found


def exploit(scored: Mapping[str, float], count: int, cut_off: float, rng: np.random.Generator) -> list[str]:
    """``count`` clients drawn by score, among those not much worse than the last one that would get in."""
    ranked = sorted(scored, key=lambda name: -scored[name])
    count = min(count, len(ranked))
    if count == 0:
        return []
    least = cut_off * scored[ranked[min(count, len(ranked) - 1)]]
    return _draw({name: scored[name] for name in ranked if scored[name] >= least}, count, rng)


def explore(rewards: Mapping[str, float], count: int, rng: np.random.Generator) -> list[str]:
    """``count`` new clients drawn by their expected reward, among the most promising."""
    ranked = sorted(rewards, key=lambda name: -rewards[name])
    return _draw({name: rewards[name] for name in ranked[: POOL * count]}, min(count, len(ranked)), rng)


def pace(percent: float, exploited: Sequence[float], current_round: int, every: int, delta: float) -> float:
    """The percentile behind T_pref, moved on: up when learning stalls, down when it leaps.

    ``exploited`` holds the utility that known clients brought in each round, the latest last.

    >>> pace(30, [10, 10, 10, 9], current_round=4, every=2, delta=5)  # 20 then 19: hardly a change
    35
    >>> pace(30, [1, 1, 10, 10], current_round=4, every=2, delta=5)  # 2 then 20
    25
    >>> pace(30, [10, 10, 6, 6], current_round=4, every=2, delta=5)
    30
    """
    if current_round < 2 * every or current_round % every:
        return percent
    before, now = sum(exploited[-2 * every : -every]), sum(exploited[-every:])
    if abs(now - before) <= 0.1 * before:
        return min(100, percent + delta)
    if abs(now - before) >= 5 * before:
        return max(delta, percent - delta)
    return percent


def _draw(weights: Mapping[str, float], count: int, rng: np.random.Generator) -> list[str]:
    if count == 0:
        return []
    # A floor, because a draw without replacement needs enough clients that can be drawn.
    share = np.maximum(np.array(list(weights.values()), dtype=np.float64), 1e-12)
    chosen = rng.choice(len(share), size=count, replace=False, p=share / share.sum())
    names = list(weights)
    return [names[i] for i in chosen]
