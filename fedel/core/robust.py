"""Means that single clients cannot move far: changes of bounded norm, and means without the extremes.

Clipping is of Sun et al. (2019), the trimmed mean and the median of every value of Yin et al. (2018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedel.core.exact_sum import CHUNK
from fedel.types import Array, Patch, Tensors

MEDIAN = 0.5
"""Trim so much at both ends, and the median is left."""
_ROOM = 1 << 18
"""Numbers that are sorted at a time: 2 MB, and as much again a few times while they are."""


@dataclass(frozen=True)
class Clip:
    """Scales the change of a client from ``model`` down to the norm ``limit``."""

    model: Tensors
    """What the round started from; read tensor by tensor."""
    limit: float

    def factor(self, patches: Mapping[str, Patch]) -> float:
        """What the client's change is multiplied by; 1 if it is within the limit, or not a number at all."""
        square = 0.0
        for name, patch in patches.items():
            square += _square(patch.values, _old(self.model[name], patch))
        norm = math.sqrt(square)
        return self.limit / norm if self.limit < norm < math.inf else 1.0

    def changed(self, name: str, patch: Patch, factor: float) -> Patch:
        """The patch with its change scaled; the very same one if there is nothing to scale."""
        return (
            patch
            if factor == 1
            else Patch(moved(_old(self.model[name], patch), patch.values, factor), patch.where)
        )


def moved(old: Array, new: Array, factor: float) -> Array:
    """``factor`` of the way from ``old`` to ``new``."""
    return (old + factor * np.subtract(new, old, dtype=np.float64)).astype(new.dtype)


def _old(old: Array, patch: Patch) -> Array:
    return old if patch.where is None else old[patch.where]


def _square(new: Array, old: Array) -> float:
    flat_new, flat_old, total = new.reshape(-1), old.reshape(-1), 0.0
    for start in range(0, flat_new.size, CHUNK):
        part = slice(start, start + CHUNK)
        change = np.subtract(flat_new[part], flat_old[part], dtype=np.float64)
        total += float(change @ change)
    return total


def num_trimmed(num_values: int, trim: float) -> int:
    """Values that are left out at each end: ``trim`` of them, rounded up, as long as one or two are left.

    >>> [num_trimmed(n, 0.1) for n in (1, 2, 3, 10, 11, 30)], [num_trimmed(n, MEDIAN) for n in (1, 2, 3, 4, 5)]
    ([0, 0, 1, 1, 2, 3], [0, 0, 1, 1, 2])
    """
    return min(math.ceil(trim * num_values - 1e-9), (num_values - 1) // 2)


def trimmed_mean(old: Array, patches: Sequence[tuple[Patch, float]], trim: float, num_absent: int = 0) -> Array:
    """Of every value, the mean over the clients that trained it without the largest and the smallest of them.

    ``patches`` come with the factor of their change. ``num_absent`` clients count as if they had sent the old
    value. What nobody trained stays. Sorts a stretch of the tensor at a time; patches of parts are indexed as a
    whole, which takes 8 bytes per value of theirs.

    >>> columns = [Patch(np.array([value, 1.0])) for value in (1.0, 2.0, 3.0, 4.0, 1e9)]
    >>> trimmed_mean(np.zeros(2), [(patch, 1.0) for patch in columns], 0.2).tolist()
    [3.0, 1.0]
    """
    rows = [_Row(patch, factor, old.shape) for patch, factor in patches]
    new, before = np.empty(old.size, old.dtype), old.reshape(-1)
    step = max(1, _ROOM // (len(rows) + num_absent))
    for start in range(0, old.size, step):
        part = before[start : start + step]
        values: NDArray[np.float64] = np.full((len(rows) + num_absent, part.size), np.nan)
        for row, into in zip(rows, values, strict=False):
            row.copy(start, part, into)
        values[len(rows) :] = part
        new[start : start + step] = _middle(values, trim, part)
    return new.reshape(old.shape)


class _Row:
    """The values of one client for a tensor, in a row."""

    def __init__(self, patch: Patch, factor: float, shape: tuple[int, ...]) -> None:
        self._values, self._factor = patch.values.reshape(-1), factor
        self._places: NDArray[np.int64] | None = None
        if patch.where is not None:
            size = int(np.prod(shape, dtype=np.int64))
            self._places = np.arange(size).reshape(shape)[patch.where].reshape(-1)
            if np.any(np.diff(self._places) < 0):
                order = np.argsort(self._places)
                self._places, self._values = self._places[order], self._values[order]

    def copy(self, start: int, old: Array, into: NDArray[np.float64]) -> None:
        """Copy the values from ``start`` on to where they belong; ``old`` are the ones before."""
        if self._places is None:
            at: slice | NDArray[np.int64] = slice(0, old.size)
            values = self._values[start : start + old.size]
        else:
            first, last = np.searchsorted(self._places, (start, start + old.size))
            at, values = self._places[first:last] - start, self._values[first:last]
        into[at] = values if self._factor == 1 else moved(old[at], values, self._factor)


def _middle(values: NDArray[np.float64], trim: float, old: Array) -> NDArray[np.float64]:
    """The trimmed mean of each column; NaN stands for a value that was not sent."""
    # The sum makes 0 of -0: which of equal values comes first in a sorted column depends on their order before.
    values = np.sort(values + 0.0, axis=0)
    counts = values.shape[0] - np.isnan(values).sum(axis=0)
    dropped = np.array([num_trimmed(count, trim) if count else 0 for count in range(values.shape[0] + 1)])[
        counts
    ]
    place = np.arange(values.shape[0])[:, None]
    kept = np.where((place >= dropped) & (place < counts - dropped), values, 0.0)
    mean = kept.sum(axis=0) / np.maximum(counts - 2 * dropped, 1)
    return np.where(counts > 0, mean, old)
