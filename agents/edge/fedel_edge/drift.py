"""When a timing profile is out of date: heat, another power mode, a neighbour on the same machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fedel.core.timing import full_step
from fedel.types import Speed, TimingProfile

TOLERANCE = 1.25
"""How many times slower or faster than its profile a device may be."""
NOTICEABLE = 1.1
"""How many times slower or faster a new profile is to be to replace the old one."""
PATIENCE = 3
"""Tasks in a row after which it is not taken for chance."""


class Drift:
    """Counts the tasks in a row for which the coordinator had to correct this device's profile by much.

    >>> drift = Drift()
    >>> [drift.lasts(Speed(slowness=s)) for s in (1.5, 1.5, 1.0, 1.5, 0.7, 1.5)]
    [False, False, False, False, False, True]
    """

    def __init__(self) -> None:
        self._num_off, self._patience = 0, PATIENCE

    def lasts(self, speed: Speed) -> bool:
        """Whether the device is to measure its profile again; the count starts again then."""
        off = not 1 / TOLERANCE <= speed.slowness <= TOLERANCE
        self._num_off = self._num_off + 1 if off else 0
        if self._num_off < self._patience:
            return False
        self._num_off = 0
        return True

    def measured(self, before: TimingProfile, after: TimingProfile) -> bool:
        """Whether the new profile is another one. If not, a neighbour takes time that no profile shows.

        Then the coordinator's correction is all there is, and measuring again can wait longer each time.
        """
        old, new = full_step(before).total("train"), full_step(after).total("train")
        changed = not old / NOTICEABLE <= new <= old * NOTICEABLE
        self._patience = PATIENCE if changed else 2 * self._patience
        return changed


async def is_idle(seconds: float, is_busy: Callable[[], bool], num_done: Callable[[], int]) -> bool:
    """Whether nothing was done for so long, nor is now. A moment between two tasks is no idle time: to measure
    then would keep the next round waiting."""
    before = num_done()
    await asyncio.sleep(seconds)
    return not is_busy() and num_done() == before
