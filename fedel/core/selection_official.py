"""ElasticTrainer's own selection, kept to compare with (algorithms 2.4 and the traps of 2.6).

It differs from ``selection.select`` in four ways that its users may not expect: seconds are rounded down to
1/1000 of the full backward pass, the shallowest tensor pays its way through as well, the tensor nearest the
input can never be chosen, and the table keeps one solution a cell, which misses the optimum now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_BINS = 1000


def select_official(
    grad_seconds: Sequence[float],
    update_seconds: Sequence[float],
    importance: Sequence[float],
    budget: float,
    num_bins: int = NUM_BINS,
) -> list[bool]:
    """As ``selection.select``, with the reference's rounding and table; lists in forward order.

    >>> select_official([0, 4, 1, 2, 0], [1, 3, 7, 1, 5], [3, 5, 10, 3, 1], budget=24, num_bins=24)
    [False, True, True, True, True]
    """
    total = sum(grad_seconds) + sum(update_seconds)
    if total <= 0:
        return [value > 0 for value in importance]
    grads = [int(num_bins * seconds / total + 1e-9) for seconds in grad_seconds]
    updates = [int(num_bins * seconds / total + 1e-9) for seconds in update_seconds]
    rounded = sum(grads) + sum(updates)
    # What rounding lost is taken off twice: once by the caller of the reference, once inside it.
    lost = rounded / num_bins
    limit = int(min(budget / total, 1.0) * lost * rounded + 1e-9)
    chosen = _table(grads[::-1], updates[::-1], list(importance[::-1]), limit)
    return chosen[::-1]


def _table(grads: list[int], updates: list[int], importance: list[float], limit: int) -> list[bool]:
    """The reference's dynamic programme; index 0 is the tensor closest to the output."""
    num_tensors = len(grads)
    reached = np.cumsum(grads) > limit
    num_usable = int(np.argmax(reached)) if reached.any() else num_tensors - 1
    best = np.zeros((num_usable + 1, limit + 1))
    takes_last = np.zeros((num_usable + 1, limit + 1), dtype=bool)
    takes_last[0] = True
    came_from = np.full((num_usable + 1, limit + 1), -1)
    for k in range(1, num_usable + 1):
        best[k] = best[k - 1]
        for before in range(k - 1, -1, -1):
            cost = updates[k - 1] + sum(grads[before:k])
            if cost > limit:
                break
            value = np.where(
                takes_last[before, : limit + 1 - cost],
                importance[k - 1] + best[before, : limit + 1 - cost],
                -np.inf,
            )
            better = np.flatnonzero(value > best[k, cost:]) + cost
            best[k, better] = value[better - cost]
            takes_last[k, better] = True
            came_from[k, better] = before
    chosen = [False] * num_tensors
    k, room = (int(i) for i in np.unravel_index(np.argmax(best), best.shape))
    while k > 0:
        before = int(came_from[k, room])
        if before < 0:
            k -= 1
            continue
        chosen[k - 1] = True
        room -= updates[k - 1] + sum(grads[before:k])
        k = before
    return chosen
