"""Updates that come after their round closed: how long and how much they count, and in which form.

A late update was trained from an older version of the model, so its values would undo what came since. What it
learned is its change against that version. The change, times a weight that falls with every round, is added to
the present version; the fold takes the result like the values of any other update (docs/decisions/0014).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedel.types import ModelSpec, Patch, Role, Tensors, Update

LATE_POLICIES = ("refuse", "next", "weigh")
MAX_ROUNDS = 100
"""An aggregator keeps a version for each round that an update may be late."""
MAX_POWER = 10.0
_WEIGHT_UNIT = 2.0**-30


@dataclass(frozen=True)
class Staleness:
    """What a run does with late updates."""

    max_rounds: int = 0
    """An update counts if it is at most this many rounds late."""
    power: float = 0.0
    """How fast its weight falls."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_rounds <= MAX_ROUNDS:
            raise ValueError(f"max_staleness = {self.max_rounds} rounds is not between 1 and {MAX_ROUNDS}")
        if not 0 <= self.power <= MAX_POWER:
            raise ValueError(f"staleness_power = {self.power:g} is not between 0 and {MAX_POWER:g}")

    @staticmethod
    def of(late: str, max_rounds: int, power: float) -> Staleness:
        """Of the settings of a run; the numbers count only with ``weigh``."""
        if late not in LATE_POLICIES:
            raise ValueError(f"late = {late!r} is not one of: {', '.join(LATE_POLICIES)}")
        if late == "weigh":
            return Staleness(max_rounds, power)
        return Staleness(1) if late == "next" else Staleness()

    def weight(self, rounds_late: int) -> float:
        """How much of a late change counts.

        >>> Staleness(4, 0.5).weight(3), Staleness(1).weight(1)
        (0.5, 1.0)
        """
        # Rounded, because the last bit of a power is not the same on all machines.
        return round(float((1 + rounds_late) ** -self.power) / _WEIGHT_UNIT) * _WEIGHT_UNIT


def caught_up(update: Update, spec: ModelSpec, weight: float, started: Tensors, present: Tensors) -> Update:
    """A late update as if its client had made ``weight`` times its change from the ``present`` version.

    ``started`` is the version that it was trained from.
    """
    return replace(update, patches=_CaughtUp(update.patches, spec, weight, started, present))


class _CaughtUp(Mapping[str, Patch]):
    """Each patch is computed when it is looked up, so that never a whole model is in memory."""

    def __init__(
        self, patches: Mapping[str, Patch], spec: ModelSpec, weight: float, started: Tensors, present: Tensors
    ) -> None:
        self._patches, self._spec, self._weight = patches, spec, weight
        self._started, self._present = started, present

    def __getitem__(self, name: str) -> Patch:
        patch, now = self._patches[name], self._present[name]
        # Statistics are no steps: a change of one, added to another, could make a variance negative.
        before = now if self._spec.by_name[name].role is Role.BUFFER else self._started[name]
        if patch.where is not None:
            now, before = now[patch.where], before[patch.where]
        with np.errstate(all="ignore"):  # the fold refuses what is not finite
            change = np.subtract(patch.values, before, dtype=np.float64)
            return replace(patch, values=(now + self._weight * change).astype(patch.values.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._patches)

    def __len__(self) -> int:
        return len(self._patches)
