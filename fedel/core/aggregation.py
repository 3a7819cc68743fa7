"""How updates become the next model: means over the clients that trained each value (paper, section 4.3).

Sums are kept in 64-bit fixed point, where addition is associative: the result has the same bits whatever
the order in which updates arrive, so a retry or a restart changes nothing. What is added is rounded to
2^-40 (2^-30 where clients carry weights other than 1, which then divide out again), far below the precision
of the float32 values that go in and come out. Memory is one accumulator, whatever the number of clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedel.errors import UpdateRefused
from fedel.types import Array, Patch, Tensors, Where

UNIT_BITS = 40
"""Fraction bits where every client counts 1: sums up to 8 million."""
WEIGHTED_BITS = 30
"""Fraction bits where weights are sample counts: sums of weight * value up to 8 billion."""
_COUNT_BITS = 28
_CHUNK = 1 << 16
_ROUNDER = np.float64(1.5 * 2.0**52)
"""Added to a number below 2^51, it leaves the nearest whole number, ties to even, in the sum's low bits."""
_ROUNDER_BITS = int(_ROUNDER.view(np.int64))


class ExactSum:
    """The weighted sum of one tensor's patches, and the weight each of its values got."""

    def __init__(self, shape: tuple[int, ...], bits: int) -> None:
        # Even a single number lies in an array: what is added there may wrap around without a warning.
        self._total: NDArray[np.int64] = np.zeros(shape or (1,), dtype=np.int64)
        self._shape, self._bits = shape, bits
        self._excess = 0
        """What every sum has too much, modulo 2^64: the upper bits of the rounders in it."""
        self.bound = 0.0
        """No sum in here is larger."""
        self.whole_weight = Fraction(0)
        self.part_weights: NDArray[np.int64] | None = None
        """Weights of the patches that covered only a part, element by element."""

    def add(self, values: Array, weight: float, where: Where, magnitude: float) -> None:
        """Add ``weight * values`` at ``where``; ``magnitude`` is the largest absolute value among them."""
        self.bound += magnitude * weight
        scale = weight * 2.0**self._bits
        if where is None:
            self.whole_weight += Fraction(weight)
            self._add_whole(values, scale, magnitude)
            return
        if self.part_weights is None:
            self.part_weights = np.zeros(self._shape, dtype=np.int64)
        self._total[where] += np.rint(values * np.float64(scale)).astype(np.int64)
        self.part_weights[where] += round(weight * 2.0**_COUNT_BITS)

    def _add_whole(self, values: Array, scale: float, magnitude: float) -> None:
        # In chunks, so that the float64 scratch stays in the cache and never grows with the tensor.
        total, flat = self._total.reshape(-1), np.ascontiguousarray(values).reshape(-1)
        scratch = np.empty(min(_CHUNK, flat.size))
        small = magnitude * scale < 2.0**51
        for start in range(0, flat.size, _CHUNK):
            sums = total[start : start + _CHUNK]
            scaled = scratch[: sums.size]
            scaled[...] = flat[start : start + _CHUNK]
            scaled *= scale
            if small:
                # The bits of the rounded number go in as they are; one subtraction at the end is enough.
                scaled += _ROUNDER
                sums += scaled.view(np.int64)
            else:
                sums += np.rint(scaled).astype(np.int64)
        self._excess += _ROUNDER_BITS if small else 0

    def _exact(self, sums: NDArray[np.int64]) -> NDArray[np.int64]:
        excess: NDArray[np.int64] = np.array([self._excess % 2**64], np.uint64).view(np.int64)
        return sums - excess

    def total(self) -> NDArray[np.float64]:
        exact = self._exact(self._total).reshape(self._shape)
        return np.multiply(exact, 2.0**-self._bits, dtype=np.float64)

    def whole_mean(self, dtype: np.dtype[Any]) -> Array:
        """``total / weight`` where every patch covered the whole tensor; in chunks, as it was added."""
        mean = np.empty(self._shape, dtype)
        total, flat, weight = self._total.reshape(-1), mean.reshape(-1), float(self.whole_weight)
        for start in range(0, flat.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            exact = self._exact(total[part])
            np.divide(exact, weight * 2.0**self._bits, out=flat[part], casting="same_kind")
        return mean

    def weights(self) -> NDArray[np.float64] | float:
        """The weight behind each value: one number, or an array where patches covered parts."""
        if self.part_weights is None:
            return float(self.whole_weight)
        return np.multiply(self.part_weights, 2.0**-_COUNT_BITS, dtype=np.float64) + float(self.whole_weight)


def fits(bound: float, more: float, bits: int) -> bool:
    """Whether so much can be added to sums up to ``bound`` without leaving their range."""
    return (bound + more) * 2.0**bits < 2.0**62


def _magnitude(values: Array) -> float:
    """The largest absolute value, NaN if there is one; in chunks, so that the second look finds the cache."""
    flat = values.reshape(-1)
    parts = (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
    return float(np.max([max(part.max(), -part.min()) for part in parts], initial=0.0))


class _Sums:
    """The sums of a round's tensors, with the checks that every update must pass before any of it counts."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.tensors: dict[str, ExactSum] = {}

    def add(self, patches: Mapping[str, Patch], weight: float) -> None:
        magnitudes = self.check(patches, weight)
        for name, patch in patches.items():
            if name not in self.tensors:
                self.tensors[name] = ExactSum(self._shapes.get(name, patch.values.shape), self._bits)
            self.tensors[name].add(patch.values, weight, patch.where, magnitudes[name])

    def check(self, patches: Mapping[str, Patch], weight: float) -> dict[str, float]:
        """The largest absolute value of each patch; refused if one of them cannot be added."""
        if not (np.isfinite(weight) and weight > 0):
            raise UpdateRefused("weight", f"an update cannot count {weight!r} times: it needs a weight above 0")
        return {name: self._check(name, patch, weight) for name, patch in patches.items()}

    def _check(self, name: str, patch: Patch, weight: float) -> float:
        magnitude = _magnitude(patch.values)
        if not np.isfinite(magnitude):
            raise UpdateRefused(
                "not_finite", f"tensor '{name}' holds NaN or Inf: training diverged, try a lower learning rate"
            )
        sum_ = self.tensors.get(name)
        if sum_ is None and patch.where is not None and name not in self._shapes:
            raise UpdateRefused("unknown_tensor", f"a patch of tensor '{name}', which the model does not have")
        if not fits(sum_.bound if sum_ else 0.0, magnitude * weight, self._bits):
            raise UpdateRefused(
                "range", f"tensor '{name}' holds {magnitude:g}, too large to average exactly: training diverged"
            )
        return magnitude

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes.update(shapes)


class MaskedMean:
    """The mean of every value over the clients that trained it; what nobody trained stays, to the bit.

    >>> model = {"a": np.zeros(2), "b": np.zeros(2), "c": np.array([7.0, 8.0])}
    >>> mean = MaskedMean()
    >>> mean.add({"a": Patch(np.array([1.0, 2.0]))})
    >>> mean.add({"a": Patch(np.array([3.0, 4.0])), "b": Patch(np.array([5.0, 6.0]))})
    >>> new = mean.finish(model)
    >>> new["a"].tolist(), new["b"].tolist(), new["c"].tolist()
    ([2.0, 3.0], [5.0, 6.0], [7.0, 8.0])
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        weighted: bool = False,
        absent_counts: bool = False,
    ) -> None:
        """``shapes`` of the full tensors are needed where patches cover parts. With ``absent_counts`` a client
        that did not send a tensor counts as if it had sent the old value (PyramidFL's zero deltas)."""
        self._sums = _Sums(WEIGHTED_BITS if weighted else UNIT_BITS)
        self._sums.expect(shapes or {})
        self._absent_counts = absent_counts
        self._weight = Fraction(0)

    def add(self, patches: Mapping[str, Patch], weight: float = 1.0) -> None:
        """Fold in one client's patches; refused as a whole (``UpdateRefused``) if one of them is unsound."""
        self._sums.add(patches, weight)
        self._weight += Fraction(weight)

    def check(self, patches: Mapping[str, Patch], weight: float = 1.0) -> None:
        """Refuse what ``add`` would refuse."""
        self._sums.check(patches, weight)

    def finish(self, model: Tensors) -> dict[str, Array]:
        """The next model, or the next values of the part of it that ``model`` holds."""
        return {name: self._next(name, old) for name, old in model.items()}

    def _next(self, name: str, old: Array) -> Array:
        sum_ = self._sums.tensors.get(name)
        if sum_ is None:
            return old
        if self._absent_counts:
            missing = float(self._weight) - sum_.weights()
            mean = (sum_.total() + old * missing) / float(self._weight)
        elif sum_.part_weights is None:
            return sum_.whole_mean(old.dtype)
        else:
            mean = _divide(sum_.total(), sum_.weights(), old)
        return mean.astype(old.dtype)


class NormalisedMean:
    """FedNova's mean: each client's change divided by its effective steps, per tensor (algorithms 12.5).

    >>> model = {"w": np.array([1.0])}
    >>> mean = NormalisedMean()
    >>> mean.add({"w": Patch(np.array([0.0]))}, weight=1, effective_steps=1)
    >>> mean.add({"w": Patch(np.array([-1.0]))}, weight=1, effective_steps=3)
    >>> round(float(mean.finish(model)["w"][0]), 6)  # 1 - (1/1 + 2/3)/2 * (1+3)/2
    -0.666667
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self._scaled = _Sums(WEIGHTED_BITS)
        self._shapes = shapes or {}
        self._scaled.expect(self._shapes)
        self._weights: dict[str, _Weights] = {}

    def add(self, patches: Mapping[str, Patch], weight: float, effective_steps: float) -> None:
        if not (np.isfinite(effective_steps) and effective_steps > 0):
            raise UpdateRefused("steps", f"{effective_steps!r} effective steps: FedNova needs a number above 0")
        self._scaled.add(patches, weight / effective_steps)
        for name, patch in patches.items():
            shape = self._shapes.get(name, patch.values.shape)
            self._weights.setdefault(name, _Weights(shape)).add(weight, effective_steps, patch.where)

    def finish(self, model: Tensors) -> dict[str, Array]:
        """The next model, or the next values of the part of it that ``model`` holds."""
        # w - (sum p a / sum p) * (sum (p/a) (w - w_n)) / sum p, over the clients that trained the value.
        return {name: self._next(name, old) for name, old in model.items()}

    def _next(self, name: str, old: Array) -> Array:
        sum_ = self._scaled.tensors.get(name)
        if sum_ is None:
            return old
        weight, steps = self._weights[name].sums()
        change = old * sum_.weights() - sum_.total()
        factor = _divide(steps, weight * weight, np.zeros(()))
        return (old - factor * change).astype(old.dtype)


class _Weights:
    """Sum of p and of p*a behind each value of one tensor."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._whole = [Fraction(0), Fraction(0)]
        self._parts: list[NDArray[np.int64]] | None = None

    def add(self, weight: float, steps: float, where: Where) -> None:
        if where is None:
            self._whole[0] += Fraction(weight)
            self._whole[1] += Fraction(weight * steps)
            return
        if self._parts is None:
            self._parts = [np.zeros(self._shape, np.int64), np.zeros(self._shape, np.int64)]
        self._parts[0][where] += round(weight * 2.0**_COUNT_BITS)
        self._parts[1][where] += round(weight * steps * 2.0**_COUNT_BITS)

    def sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        whole = [np.float64(float(w)) for w in self._whole]
        if self._parts is None:
            return np.asarray(whole[0]), np.asarray(whole[1])
        return tuple(p * 2.0**-_COUNT_BITS + w for p, w in zip(self._parts, whole, strict=True))  # type: ignore[return-value]


def _divide(total: Array, weight: Array | float, otherwise: Array) -> Array:
    """``total / weight``, and ``otherwise`` where the weight is 0."""
    weight = np.asarray(weight)
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1), otherwise)
