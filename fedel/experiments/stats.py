"""Means with 95 % confidence intervals and paired comparisons over seeds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

CONFIDENCE = 0.95
MANY = 100
"""Seeds; nobody does more."""


@dataclass(frozen=True)
class Estimate:
    """A mean, and half the width of its confidence interval if there is more than one value."""

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)


@dataclass(frozen=True)
class Factor:
    """How many times more something is, as a geometric mean: 4 and 1/4 are equally far from 1."""

    logs: Estimate
    """Of the logarithms of the ratios."""

    @property
    def mean(self) -> float:
        return math.exp(self.logs.mean)

    @property
    def low(self) -> float:
        return math.exp(self.logs.low)

    @property
    def high(self) -> float:
        return math.exp(self.logs.high)


@dataclass(frozen=True)
class Answer:
    """To a claim; answers of one kind are equal, whatever their reasons."""

    kind: str
    reason: str = field(default="", compare=False)
    """Why the runs cannot tell, or why it is so."""

    def __str__(self) -> str:
        return self.kind


HOLDS, FAILS, UNDECIDED, UNKNOWN = map(Answer, ("holds", "does not hold", "undecided", "not known yet"))
ANSWERS = (HOLDS, FAILS, UNDECIDED, UNKNOWN)
"""``undecided`` where the confidence interval has both answers in it, which with one seed it always has;
``not known yet`` where runs are missing."""


def at_least(found: Estimate | None, bound: float) -> Answer:
    """Whether a figure is at least ``bound``, as far as its seeds can tell.

    >>> [str(at_least(Estimate(mean, 1.0, 3), 2.0)) for mean in (3.5, 2.5, 0.5)]
    ['holds', 'undecided', 'does not hold']
    >>> at_least(Estimate(9.0, None, 1), 2.0).kind, at_least(None, 2.0).kind
    ('undecided', 'not known yet')
    """
    if found is None:
        return UNKNOWN
    if found.half is None:
        return Answer(UNDECIDED.kind, "one seed decides nothing")
    if found.low >= bound:
        return HOLDS
    if found.high < bound:
        return FAILS
    needed = seeds_to_decide(found, bound)
    return Answer(UNDECIDED.kind, f"about {needed} seeds would tell" if needed else f"over {MANY} seeds needed")


def at_most(found: Estimate | None, bound: float) -> Answer:
    """
    >>> at_most(Estimate(1.0, 0.5, 3), 2.0).kind
    'holds'
    """
    return at_least(None if found is None else Estimate(-found.mean, found.half, found.count), -bound)


def all_of(*answers: Answer) -> Answer:
    """The answer to a claim of several parts: one that does not hold is enough.

    >>> [str(all_of(HOLDS, UNDECIDED, FAILS)), str(all_of(HOLDS, UNDECIDED)), str(all_of(HOLDS, HOLDS))]
    ['does not hold', 'undecided', 'holds']
    """
    worst = next((each for each in (FAILS, UNKNOWN, UNDECIDED) if each in answers), HOLDS)
    reasons = dict.fromkeys(each.reason for each in answers if each == worst and each.reason)
    return Answer(worst.kind, "; ".join(reasons))


def seeds_to_decide(found: Estimate, bound: float) -> int | None:
    """How many seeds put the bound outside the interval, if mean and deviation stay as they are.

    >>> seeds_to_decide(estimate([1.0, 3.0, 2.0, 2.0]), 1.0), seeds_to_decide(estimate([1.0, 3.0]), 2.1)
    (6, None)
    """
    if found.half is None:
        return None
    deviation = found.half * math.sqrt(found.count) / _two_sided(found.count)
    distance = abs(found.mean - bound)
    more = range(found.count + 1, MANY + 1)
    return next((n for n in more if _two_sided(n) * deviation / math.sqrt(n) <= distance), None)


@dataclass(frozen=True)
class Paired:
    """How much higher one method is than another, with the same seeds."""

    difference: Estimate
    p_value: float | None
    """Two-sided; None for a single pair, which says nothing about chance."""
    test: str


def factor(ratios: Sequence[float]) -> Factor:
    """
    >>> found = factor([2.0, 0.5]); round(found.mean, 6), found.low < 0.5, found.high > 2.0
    (1.0, True, True)
    """
    return Factor(estimate([math.log(ratio) for ratio in ratios]))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval by Student's t.

    >>> e = estimate([1.0, 2.0, 3.0]); round(e.mean, 3), round(e.half, 3)
    (2.0, 2.484)
    >>> estimate([4.0])
    Estimate(mean=4.0, half=None, count=1)
    """
    count = len(values)
    if count == 1:
        return Estimate(values[0], None, 1)
    error = statistics.stdev(values) / math.sqrt(count)
    return Estimate(statistics.fmean(values), _two_sided(count) * error, count)


@cache
def _two_sided(count: int) -> float:
    """Half the width of a confidence interval, in standard errors."""
    return t_quantile(0.5 + CONFIDENCE / 2, count - 1)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """A paired t test; from six pairs on Wilcoxon's signed ranks, whose p is never below 5 % with fewer."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    difference = estimate(differences)
    if len(differences) == 1:
        return Paired(difference, None, "one pair")
    if len(differences) >= 6:
        return Paired(difference, wilcoxon(differences), "Wilcoxon")
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if error == 0:
        return Paired(difference, 1.0 if difference.mean == 0 else 0.0, "paired t")
    t = abs(difference.mean / error)
    return Paired(difference, 2 * (1 - t_cdf(t, len(differences) - 1)), "paired t")


def wilcoxon(differences: Sequence[float]) -> float:
    """Exact two-sided p of the signed ranks; zeros are left out, equal values share their rank.

    >>> wilcoxon([1, 2, 3, 4, 5, 6])
    0.03125
    """
    nonzero = [d for d in differences if d]
    sizes = sorted(map(abs, nonzero))
    rank = {s: statistics.fmean(i for i, other in enumerate(sizes, start=1) if other == s) for s in sizes}
    ranks = [rank[abs(d)] for d in nonzero]
    centre = sum(ranks) / 2
    seen = abs(sum(r for r, d in zip(ranks, nonzero, strict=True) if d > 0) - centre)
    sums = [
        abs(sum(itertools.compress(ranks, signs)) - centre)
        for signs in itertools.product((0, 1), repeat=len(ranks))
    ]
    return sum(s >= seen - 1e-9 for s in sums) / len(sums)


def t_cdf(t: float, freedom: int) -> float:
    """Student's distribution with an integer number of degrees of freedom: a finite sum.

    >>> round(t_cdf(4.303, 2), 4), round(t_cdf(2.228, 10), 4), t_cdf(0.0, 3)
    (0.975, 0.975, 0.5)
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    if odd:
        return 0.5 + (angle + math.sin(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2


def t_quantile(share: float, freedom: int) -> float:
    """
    >>> round(t_quantile(0.975, 1), 3), round(t_quantile(0.975, 4), 3)
    (12.706, 2.776)
    """
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2
