"""How updates become the next model: means over the clients that trained each value (paper, section 4.3).

Sums are kept in fixed point (``exact_sum.py``), where addition is associative: the result has the same bits
whatever the order in which updates arrive, so a retry or a restart changes nothing. What is added is rounded to
2^-40 (2^-30 where clients carry weights other than 1, which then divide out again), far below the precision
of the float32 values that go in and come out. Memory is one accumulator, whatever the number of clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedel.core.exact_sum import CHUNK, COUNT_BITS, MAX_UPDATES, WORD, ExactSum, WideSums
from fedel.errors import UpdateRefused
from fedel.types import Array, Patch, Tensors, Where

UNIT_BITS = 40
"""Fraction bits where every client counts 1: values up to 4 million."""
WEIGHTED_BITS = 30
"""Fraction bits where weights are sample counts: weight * value up to 4 billion."""
MAX_WEIGHT = WORD / 2**COUNT_BITS
"""What a client may count: 17 billion. With FedNova also divided by its effective steps, and where it trained
parts of tensors, multiplied by them."""


def _magnitude(values: Array) -> float:
    """The largest absolute value, NaN if there is one; in chunks, so that the second look finds the cache."""
    flat = values.reshape(-1)
    parts = (flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK))
    return float(np.max([max(part.max(), -part.min()) for part in parts], initial=0.0))


def _shape_at(shape: tuple[int, ...], where: Where) -> tuple[int, ...] | None:
    """The shape of what ``where`` indexes; ``None`` if it is outside."""
    if isinstance(where, np.ndarray):
        return (int(np.count_nonzero(where)),) if where.shape == shape else None
    try:
        return np.broadcast_to(np.int8(0), shape)[where].shape
    except IndexError:
        return None


class Sums:
    """The sums of a round's tensors, with the checks that every update must pass before any of it counts.

    A bound holds for each update by itself, never for what others left: who comes first changes nothing.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._num_updates = 0
        self.tensors: dict[str, ExactSum] = {}

    def add(self, patches: Mapping[str, Patch], weight: float) -> None:
        magnitudes = self.check(patches, weight)
        for name in patches:
            if name not in self.tensors:
                shape = self._shapes[name] if name in self._shapes else patches[name].values.shape
                self.tensors[name] = ExactSum(shape, self.bits)
        for name, patch in patches.items():
            self.tensors[name].add(patch.values, weight, patch.where, magnitudes[name])
        self._num_updates += 1

    def check(self, patches: Mapping[str, Patch], weight: float) -> dict[str, float]:
        """The largest absolute value of each patch; refused if one of them cannot be added."""
        if not (np.isfinite(weight) and 0 < weight < MAX_WEIGHT):
            raise UpdateRefused(
                "weight",
                f"an update cannot count {weight!r} times: its weight must be above 0 and below {MAX_WEIGHT:g}",
            )
        if self._num_updates >= MAX_UPDATES:
            raise UpdateRefused("full", f"a round takes at most {MAX_UPDATES} updates: have fewer participants")
        return {name: self._check(name, patch, weight) for name, patch in patches.items()}

    def _check(self, name: str, patch: Patch, weight: float) -> float:
        self._check_shape(name, patch)
        magnitude = _magnitude(patch.values)
        if not np.isfinite(magnitude):
            raise UpdateRefused(
                "not_finite", f"tensor '{name}' holds NaN or Inf: training diverged, try a lower learning rate"
            )
        if magnitude * weight * 2.0**self.bits >= WORD:
            raise UpdateRefused(
                "range",
                f"tensor '{name}' holds {magnitude:g}, too large to average exactly with weight {weight:g}: "
                "training diverged, try a lower learning rate",
            )
        return magnitude

    def _check_shape(self, name: str, patch: Patch) -> None:
        known = self.tensors.get(name)
        shape = known.shape if known else self._shapes.get(name)
        if patch.where is None:
            fits = shape is None or patch.values.shape == shape
        elif shape is None:
            raise UpdateRefused("unknown_tensor", f"a patch of tensor '{name}', which the model does not have")
        else:
            fits = patch.values.shape == _shape_at(shape, patch.where)
        if not fits:
            raise UpdateRefused(
                "shape", f"the values of tensor '{name}' are {patch.values.shape}, which do not fit {shape}"
            )

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes.update(shapes)


class MaskedMean:
    """The mean of every value over the clients that trained it; what nobody trained stays, to the bit.

    With ``damping`` a value moves ``share ** damping`` of the way to that mean, where ``share`` is the weight
    of the clients that trained it over the weight of all clients of the round. 0 is the plain mean; with 1 a
    client that did not send a value counts as if it had sent the old one.

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
        damping: float = 0.0,
    ) -> None:
        """``shapes`` of the full tensors are needed where patches cover parts."""
        self._sums = Sums(WEIGHTED_BITS if weighted else UNIT_BITS)
        self._sums.expect(shapes or {})
        self._damping = damping
        self.bits = self._sums.bits
        self._weight = Fraction(0)

    def add(self, patches: Mapping[str, Patch], weight: float = 1.0) -> None:
        """Fold in one client's patches; refused as a whole (``UpdateRefused``) if one of them is unsound."""
        self._sums.add(patches, weight)
        self._weight += Fraction(weight)

    def check(self, patches: Mapping[str, Patch], weight: float = 1.0) -> None:
        """Refuse what ``add`` would refuse."""
        self._sums.check(patches, weight)

    def add_sum(self, name: str, total: NDArray[np.int64], shape: tuple[int, ...], weight: int) -> None:
        """Fold in what clients have summed up themselves: ``fixed_point`` of a tensor, and their weight."""
        sums = self._sums.tensors.setdefault(name, ExactSum(shape, self._sums.bits))
        sums.add_sum(total, weight)

    def finish(self, model: Tensors) -> dict[str, Array]:
        """The next model, or the next values of the part of it that ``model`` holds."""
        return {name: self._next(name, old) for name, old in model.items()}

    def _next(self, name: str, old: Array) -> Array:
        sum_ = self._sums.tensors.get(name)
        if sum_ is None:
            return old
        weights = sum_.weights()
        step = _step(weights, self._weight, self._damping) if self._damping else None
        if sum_.part_weights is None:
            mean = sum_.whole_mean(old.dtype)
            return mean if step is None else mixed(mean, old, float(step))
        mean = _divide(sum_.total(), weights, old)
        if step is not None:
            mean = np.where(step > 0, step * mean + (1 - step) * old, old)
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

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] | None = None, damping: float = 0.0) -> None:
        """``damping`` as in ``MaskedMean``."""
        self._scaled = Sums(WEIGHTED_BITS)
        self._damping, self._weight = damping, Fraction(0)
        self._shapes = shapes or {}
        self._scaled.expect(self._shapes)
        self._weights: dict[str, _Weights] = {}

    def add(self, patches: Mapping[str, Patch], weight: float, effective_steps: float) -> None:
        if not (np.isfinite(effective_steps) and effective_steps > 0):
            raise UpdateRefused("steps", f"{effective_steps!r} effective steps: FedNova needs a number above 0")
        for name, patch in patches.items():
            if weight * effective_steps >= (WORD if patch.where is None else MAX_WEIGHT):
                raise UpdateRefused(
                    "steps",
                    f"tensor '{name}': {effective_steps:g} effective steps are too many to sum up exactly",
                )
        self._scaled.add(patches, weight / effective_steps)
        self._weight += Fraction(weight)
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
        if self._damping:
            factor = factor * _step(weight, self._weight, self._damping)
        return (old - factor * change).astype(old.dtype)


class _Weights:
    """Sum of p and of p*a behind each value of one tensor."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._whole = [Fraction(0), Fraction(0)]
        self._parts: list[WideSums] | None = None

    def add(self, weight: float, steps: float, where: Where) -> None:
        if where is None:
            self._whole[0] += Fraction(weight)
            self._whole[1] += Fraction(weight * steps)
            return
        if self._parts is None:
            self._parts = [WideSums(self._shape), WideSums(self._shape)]
        for part, number in zip(self._parts, (weight, weight * steps), strict=True):
            count = round(number * 2.0**COUNT_BITS)
            part.add(count, count, where)

    def sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        whole = [np.float64(float(w)) for w in self._whole]
        if self._parts is None:
            return np.asarray(whole[0]), np.asarray(whole[1])
        parts = [part.sums().reshape(self._shape) * 2.0**-COUNT_BITS for part in self._parts]
        return parts[0] + whole[0], parts[1] + whole[1]


def mixed(new: Array, old: Array, part: float) -> Array:
    """``part`` of the new values and the rest of the old ones; all of the new ones are these to the bit.

    In chunks, so that the float64 scratch never grows with the tensor.

    >>> mixed(np.array([4.0]), np.array([8.0]), 0.25).tolist()
    [7.0]
    """
    between = np.empty(new.shape, new.dtype)
    flat, flat_new, flat_old = between.reshape(-1), new.reshape(-1), old.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        piece = slice(start, start + CHUNK)
        scaled = np.multiply(flat_new[piece], part, dtype=np.float64)
        scaled += np.multiply(flat_old[piece], 1 - part, dtype=np.float64)
        flat[piece] = scaled
    return between


def _step(weights: Array | float, all_weights: Fraction, damping: float) -> NDArray[np.float64]:
    """The share of the way that a damped value moves; ``weights`` are of the clients that trained it.

    Machines compute powers that differ in the last bit of 52: it is rounded away.
    """
    share = np.asarray(weights, np.float64) / float(all_weights)
    return np.power(share, damping).astype(np.float32).astype(np.float64)


def _divide(total: Array, weight: Array | float, otherwise: Array) -> Array:
    """``total / weight``, and ``otherwise`` where the weight is 0."""
    weight = np.asarray(weight)
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1), otherwise)
