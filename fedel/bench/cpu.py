"""CPU seconds of a piece of work in this process, beside its floor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Work = Callable[[], Any]
REPEATS = 5
SHORT_SECONDS = 0.05


@dataclass(frozen=True)
class Case:
    """Something that FedEL does often, and the least that could be done instead."""

    what: str
    about: str
    """On how much."""
    work: Work
    floor: str
    """What the floor is."""
    least: Work


def once(work: Work) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def least_cpu(*works: Work, repeats: int = REPEATS) -> list[float]:
    """Of the fastest of a few repeats, in turns: other work on the machine only adds to it.

    What is too short for the clock is done several times at once.
    """
    times = [_times(work) for work in works]
    best = [float("inf")] * len(works)
    for _ in range(repeats):
        for place, (work, number) in enumerate(zip(works, times, strict=True)):
            best[place] = min(best[place], once(partial(_again, work, number)) / number)
    return best


def _again(work: Work, number: int) -> None:
    for _ in range(number):
        work()


def _times(work: Work) -> int:
    """How often it fits into a short time, waiting included; the first call only warms up."""
    work()
    begin = time.perf_counter()
    work()
    return max(1, min(1000, int(SHORT_SECONDS / (time.perf_counter() - begin))))
