"""Which tensors to train within the budget (paper, section 4.1; ElasticTrainer; algorithms 2.4, 2.6, 22.6).

Training a set of tensors costs the update of each, and the way back from the loss to the shallowest one
(``timing.backward_seconds``). That way depends only on the shallowest tensor ``d``, so the best set is the
best over ``d`` of: ``d`` itself, plus a 0/1 knapsack of the deeper tensors in the room that is left. One scan
from the output to the input keeps the knapsack and tries every ``d``: O(N * T).

The knapsack is kept as the exact frontier of (seconds, importance) as long as that is small, which it is for
tens of tensors. Beyond, seconds are rounded *up* to 1/10,000 of the budget: still never over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fedel.core.timing import backward_seconds
from fedel.types import Array

NUM_BINS = 10_000
MAX_FRONTIER = 2_000
"""States beyond which the exact frontier costs more time than 10,000 bins do."""
ROUNDING = 1e-12
"""Relative error that adding the same seconds in another order can make."""


def select(
    grad_seconds: Sequence[float],
    update_seconds: Sequence[float],
    importance: Sequence[float],
    budget: float,
) -> list[bool]:
    """The tensors, in forward order, with the largest summed importance that train within ``budget`` seconds.

    Tensors without positive importance are never chosen. Among equals the cheaper set wins.

    >>> select([0, 4, 1, 2, 0], [1, 3, 7, 1, 5], [3, 5, 10, 3, 1], budget=14)
    [False, True, True, True, False]
    """
    if not len(grad_seconds) == len(update_seconds) == len(importance):
        raise ValueError(
            f"select needs three lists of one length, got {len(grad_seconds)}, {len(update_seconds)} "
            f"and {len(importance)}"
        )
    if min([*grad_seconds, *update_seconds], default=0) < 0:
        raise ValueError("select needs seconds of at least 0")
    useful = [value > 0 for value in importance]
    if backward_seconds(grad_seconds, update_seconds, useful) <= budget:
        return useful
    if budget < 0:
        return [False] * len(useful)
    chosen = _best(grad_seconds, update_seconds, importance, budget)
    if backward_seconds(grad_seconds, update_seconds, chosen) > budget:
        chosen = _best(grad_seconds, update_seconds, importance, budget * (1 - ROUNDING))
    return chosen


def _best(
    grad_seconds: Sequence[float], update_seconds: Sequence[float], importance: Sequence[float], budget: float
) -> list[bool]:
    try:
        return _scan(_Frontier(budget), grad_seconds, update_seconds, importance, budget)
    except _TooLarge:
        chosen = _scan(_Bins(budget), grad_seconds, update_seconds, importance, budget)
        return _fill_up(chosen, grad_seconds, update_seconds, importance, budget)


class _Knapsack(Protocol):
    """Best summed importance of a subset of the items put in so far, for every amount of room."""

    def best(self, room: float) -> tuple[float, float, int]:
        """Importance, seconds and handle of the best subset that takes at most ``room`` seconds."""
        ...

    def put(self, seconds: float, value: float, room: float) -> None:
        """Offer one more item; subsets above ``room`` are never needed again."""
        ...

    def subset(self, num_items: int, handle: int) -> set[int]:
        """The items, in the order put in, of a subset found when there were ``num_items`` of them."""
        ...


def _scan(
    knapsack: _Knapsack,
    grad_seconds: Sequence[float],
    update_seconds: Sequence[float],
    importance: Sequence[float],
    budget: float,
) -> list[bool]:
    chosen = [False] * len(importance)
    winner: tuple[float, float, int, int, int] | None = None
    items: list[int] = []
    way_back = 0.0
    for d in reversed(range(len(importance))):
        if importance[d] > 0:
            room = budget - way_back - update_seconds[d]
            if room >= 0:
                value, seconds, handle = knapsack.best(room)
                value += importance[d]
                seconds += way_back + update_seconds[d]
                if winner is None or (value, -seconds) > (winner[0], -winner[1]):
                    winner = (value, seconds, d, len(items), handle)
            if update_seconds[d] <= budget:
                knapsack.put(update_seconds[d], importance[d], budget - way_back - grad_seconds[d])
                items.append(d)
        way_back += grad_seconds[d]
        if way_back > budget:
            break
    if winner is not None:
        _, _, shallowest, num_items, handle = winner
        chosen[shallowest] = True
        for item in knapsack.subset(num_items, handle):
            chosen[items[item]] = True
    return chosen


class _TooLarge(Exception):
    """The exact frontier has outgrown its use."""


class _Frontier:
    """All subsets that no other subset beats in both seconds and importance (Nemhauser and Ullmann)."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._seconds = np.zeros(1)
        self._values = np.zeros(1)
        self._parents: list[Array] = []
        """For each item, for each state after it: 2 * the state before it, + 1 if the item was taken."""

    def best(self, room: float) -> tuple[float, float, int]:
        state = int(np.searchsorted(self._seconds, room, side="right")) - 1
        return float(self._values[state]), float(self._seconds[state]), state

    def put(self, seconds: float, value: float, room: float) -> None:
        all_seconds = np.concatenate([self._seconds, self._seconds + seconds])
        all_values = np.concatenate([self._values, self._values + value])
        before = np.arange(len(self._seconds)) * 2
        parents = np.concatenate([before, before + 1])
        order = np.lexsort((-all_values, all_seconds))
        all_values = all_values[order]
        keep = np.empty(len(order), dtype=bool)
        keep[0] = True
        keep[1:] = all_values[1:] > np.maximum.accumulate(all_values)[:-1]
        keep &= all_seconds[order] <= max(room, 0.0)
        if not keep.any():
            keep[0] = True
        if keep.sum() > MAX_FRONTIER:
            raise _TooLarge
        self._seconds = all_seconds[order][keep]
        self._values = all_values[keep]
        self._parents.append(parents[order][keep])

    def subset(self, num_items: int, handle: int) -> set[int]:
        items = set()
        for item in reversed(range(num_items)):
            before, taken = divmod(int(self._parents[item][handle]), 2)
            if taken:
                items.add(item)
            handle = before
        return items


class _Bins:
    """The textbook table: best importance for each of 10,000 amounts of room."""

    def __init__(self, budget: float) -> None:
        self._bin_seconds = budget / NUM_BINS
        self._values = np.zeros(NUM_BINS + 1)
        self._weights: list[int] = []
        self._taken: list[Array] = []

    def best(self, room: float) -> tuple[float, float, int]:
        value = self._values[min(int(room / self._bin_seconds), NUM_BINS)]
        least = int(np.searchsorted(self._values, value, side="left"))
        return float(value), least * self._bin_seconds, least

    def put(self, seconds: float, value: float, room: float) -> None:
        del room
        weight = min(int(np.ceil(seconds / self._bin_seconds)), NUM_BINS + 1)
        taken = np.zeros(NUM_BINS + 1, dtype=bool)
        if weight <= NUM_BINS:
            with_item = self._values[: NUM_BINS + 1 - weight] + value
            taken[weight:] = with_item > self._values[weight:]
            self._values[weight:] = np.maximum(self._values[weight:], with_item)
        self._weights.append(weight)
        self._taken.append(taken)

    def subset(self, num_items: int, handle: int) -> set[int]:
        items = set()
        for item in reversed(range(num_items)):
            if self._taken[item][handle]:
                items.add(item)
                handle -= self._weights[item]
        return items


def _fill_up(
    chosen: list[bool],
    grad_seconds: Sequence[float],
    update_seconds: Sequence[float],
    importance: Sequence[float],
    budget: float,
) -> list[bool]:
    """Use the room that rounding up left: more tensors on the way that is paid for already."""
    if True not in chosen:
        return chosen
    room = budget - backward_seconds(grad_seconds, update_seconds, chosen)
    left_out = [k for k in range(chosen.index(True), len(chosen)) if not chosen[k] and importance[k] > 0]
    for k in sorted(left_out, key=lambda k: importance[k], reverse=True):
        if update_seconds[k] <= room:
            chosen[k] = True
            room -= update_seconds[k]
    return chosen
