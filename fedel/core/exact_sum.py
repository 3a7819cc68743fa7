"""Sums in fixed point, where addition is associative: the same bits whatever the order of what is added.

A number is rounded to a multiple of 2^-bits and added as a whole number of 64 bits. Where the sums may outgrow
64 bits, a second word takes the upper part: what a single update may hold is bounded, what all of them add up
to is not, so that nobody can use up the room of others.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedel.types import Array, Where

MAX_UPDATES = 2**20
"""Updates that fit into a sum, each at its largest: with more, the upper word would not be exact as a float."""
WORD = 2.0**62
"""Every whole number that is added is smaller: ``weight * value * 2^bits``, ``weight * 2^28``."""
COUNT_BITS = 28
"""Fraction bits of the weight behind a value, where patches cover parts."""
CHUNK = 1 << 16
_LOW_BITS = 32
_LOW_MASK = np.int64(2**_LOW_BITS - 1)
_ROUNDER = np.float64(1.5 * 2.0**52)
"""Added to a number below 2^51, it leaves the nearest whole number, ties to even, in the sum's low bits."""
_ROUNDER_BITS = int(_ROUNDER.view(np.int64))


class WideSums:
    """An array of exact sums of whole numbers below 2^62. The second word is made when it is first needed."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        # Even a single number lies in an array: what is added there may wrap around without a warning.
        self.low: NDArray[np.int64] = np.zeros(shape or (1,), dtype=np.int64)
        self._high: NDArray[np.int64] | None = None
        self._bound = 0.0
        """No sum in ``low`` is larger."""
        self.excess = 0
        """What every sum in ``low`` has too much, modulo 2^64: the upper bits of the rounders in it."""

    def make_room(self, largest: float) -> None:
        """Call before numbers up to ``largest`` are added to ``low``."""
        if self._bound + largest >= WORD:
            exact = self._words(slice(None)).reshape(self.low.shape)
            if self._high is None:
                self._high = np.zeros_like(self.low)
            self._high += exact >> _LOW_BITS
            np.bitwise_and(exact, _LOW_MASK, out=self.low)
            self.excess, self._bound = 0, 2.0**_LOW_BITS
        self._bound += largest + 1

    def add(self, numbers: int | NDArray[np.int64], largest: float, where: Where) -> None:
        """Add at ``where``; no number is larger than ``largest``."""
        self.make_room(largest)
        if isinstance(where, np.ndarray):
            # A place in a row is found once; a mask would be searched for reading and for writing.
            self.low.reshape(-1)[np.flatnonzero(where)] += numbers
        else:
            self.low[where] += numbers

    def _words(self, part: slice) -> NDArray[np.int64]:
        excess: NDArray[np.int64] = np.array([self.excess % 2**64], np.uint64).view(np.int64)
        return self.low.reshape(-1)[part] - excess

    def sums(self, part: slice = slice(None)) -> NDArray[np.int64] | NDArray[np.float64]:
        """Sums in a row: whole numbers, or the floats nearest to them where a word is not enough."""
        words = self._words(part)
        if self._high is None:
            return words
        # Both summands are exact, so that there is one rounding, as from a whole number to a float.
        upper = (self._high.reshape(-1)[part] + (words >> _LOW_BITS)).astype(np.float64) * 2.0**_LOW_BITS
        return upper + (words & _LOW_MASK).astype(np.float64)


def fixed_point(values: Array, weight: float, bits: int) -> NDArray[np.int64]:
    """``weight * values`` as whole numbers of 2^-bits, rounded as an ``ExactSum`` rounds."""
    return np.rint(values * np.float64(weight * 2.0**bits)).astype(np.int64)


class ExactSum:
    """The weighted sum of one tensor's patches, and the weight each of its values got.

    The caller checks what it adds: ``weight * magnitude * 2^bits`` and ``weight * 2^28`` stay below 2^62.
    """

    def __init__(self, shape: tuple[int, ...], bits: int) -> None:
        self.shape, self._bits = shape, bits
        self._total = WideSums(shape)
        self.whole_weight = Fraction(0)
        self.part_weights: WideSums | None = None
        """Weights of the patches that covered only a part, element by element."""

    def add(self, values: Array, weight: float, where: Where, magnitude: float) -> None:
        """Add ``weight * values`` at ``where``; ``magnitude`` is the largest absolute value among them."""
        scale = weight * 2.0**self._bits
        if where is None:
            self._total.make_room(magnitude * scale)
            self.whole_weight += Fraction(weight)
            self._add_whole(values, scale, magnitude)
            return
        if self.part_weights is None:
            self.part_weights = WideSums(self.shape)
        count = round(weight * 2.0**COUNT_BITS)
        self._total.add(fixed_point(values, weight, self._bits), magnitude * scale, where)
        self.part_weights.add(count, count, where)

    def add_sum(self, total: NDArray[np.int64], weight: int) -> None:
        """Add what others have summed up: ``fixed_point`` of whole tensors, and their weight."""
        self._total.make_room(float(np.abs(total.astype(np.float64)).max(initial=0.0)))
        self._total.low += total.reshape(self._total.low.shape)
        self.whole_weight += weight

    def _add_whole(self, values: Array, scale: float, magnitude: float) -> None:
        # In chunks, so that the float64 scratch stays in the cache and never grows with the tensor.
        total, flat = self._total.low.reshape(-1), np.ascontiguousarray(values).reshape(-1)
        scratch = np.empty(min(CHUNK, flat.size))
        small = magnitude * scale < 2.0**51
        for start in range(0, flat.size, CHUNK):
            sums = total[start : start + CHUNK]
            scaled = scratch[: sums.size]
            scaled[...] = flat[start : start + CHUNK]
            scaled *= scale
            if small:
                # The bits of the rounded number go in as they are; one subtraction at the end is enough.
                scaled += _ROUNDER
                sums += scaled.view(np.int64)
            else:
                sums += np.rint(scaled).astype(np.int64)
        self._total.excess += _ROUNDER_BITS if small else 0

    def total(self) -> NDArray[np.float64]:
        return np.multiply(self._total.sums().reshape(self.shape), 2.0**-self._bits, dtype=np.float64)

    def whole_mean(self, dtype: np.dtype[Any]) -> Array:
        """``total / weight`` where every patch covered the whole tensor; in chunks, as it was added."""
        mean = np.empty(self.shape, dtype)
        flat, weight = mean.reshape(-1), float(self.whole_weight)
        for start in range(0, flat.size, CHUNK):
            part = slice(start, start + CHUNK)
            np.divide(self._total.sums(part), weight * 2.0**self._bits, out=flat[part], casting="same_kind")
        return mean

    def weights(self) -> NDArray[np.float64] | float:
        """The weight behind each value: one number, or an array where patches covered parts."""
        if self.part_weights is None:
            return float(self.whole_weight)
        parts = self.part_weights.sums().reshape(self.shape)
        return np.multiply(parts, 2.0**-COUNT_BITS, dtype=np.float64) + float(self.whole_weight)
