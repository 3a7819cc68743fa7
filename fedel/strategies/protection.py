"""What ``[protection]`` puts around a method's fold: bounded changes, robust means, noise (docs/privacy.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedel.core.aggregation import UNIT_BITS, MaskedMean, Sums
from fedel.core.noise import gaussian
from fedel.core.robust import MEDIAN, Clip, trimmed_mean
from fedel.core.secure_sum import MIN_GROUP
from fedel.errors import ConfigError
from fedel.job import Protection, RunConfig
from fedel.strategies.base import MeanFold
from fedel.strategies.masked_fold import MaskedFold
from fedel.strategies.secure_fold import SecureFold
from fedel.types import Array, Fold, Folded, ModelSpec, Patch, Role, Strategy, Tensors, Update

_SLACK = 1 - 1e-6
"""A change is clipped to a little less than it may be: it is rounded to 2^-40 afterwards, value by value."""


@dataclass(frozen=True)
class RoundStart:
    """What a protected fold must know of its round."""

    model: Tensors
    """The version that the round started from. Tensors are looked up one by one and may be read from a file."""
    round_num: int = 0
    share: float = 1.0
    """Of the model's values, those that this aggregator keeps. Nobody sees the norm of a whole change where
    several keep the model: each clips its part to the norm times the root of its share."""
    secret: bytes = b""
    """What the noise is made from; it never leaves the aggregator."""
    comes_masked: bool = False
    """With secure aggregation: clients mask their updates themselves. In a simulation the fold does."""


def check(strategy: Strategy, spec: ModelSpec, protection: Protection) -> None:
    """Refuse a protection that does not go with the method or the model."""
    needs_mean = protection.fold != "mean" or protection.noise_multiplier or protection.secure
    fold = strategy.fold(spec) if needs_mean else None
    if needs_mean and not isinstance(fold, MeanFold):
        raise ConfigError(
            f"[protection]: '{strategy.name}' has a fold of its own; only clip_norm works with it. The other "
            "options replace the mean of a method that takes one, such as fedel or fedavg"
        )
    if isinstance(fold, MeanFold) and fold.damping and not protection.secure:
        _check_damping(strategy, fold.damping, protection)
    if protection.secure and strategy.sends_parts:
        raise ConfigError(
            f"[protection] secure: '{strategy.name}' sends parts of tensors, of which no sum per value is"
            " known; take a method that sends whole tensors, such as fedel or fedavg"
        )
    statistics = [t.name for t in spec.tensors if t.role is Role.BUFFER]
    if protection.noise_multiplier and statistics:
        raise ConfigError(
            f"[protection] noise_multiplier: the model has batch-norm statistics ('{statistics[0]}'), which"
            " noise makes useless; take a model without batch norm (workload.model_options.batch_norm = false)"
        )


def _check_damping(strategy: Strategy, damping: float, protection: Protection) -> None:
    by_value = protection.fold != "mean" and strategy.sends_parts
    if damping < 1 or by_value:
        replacing = "noise_multiplier" if protection.noise_multiplier else f"fold = '{protection.fold}'"
        raise ConfigError(
            f"[protection] {replacing}: it replaces the mean that strategy.damping = {damping:g} slows down;"
            f" set damping to 0{'' if by_value else ', or to 1, where the absent count as no change'}"
        )


def check_deployable(run: RunConfig) -> None:
    """Refuse a protection that no round of a federation could have."""
    rounds = run.rounds
    if run.protection.secure and (rounds.min_clients < MIN_GROUP or 0 < rounds.num_participants < MIN_GROUP):
        raise ConfigError(
            f"[protection] secure: fewer than {MIN_GROUP} clients do not hide each other; set"
            f" rounds.min_clients to {MIN_GROUP} or more (it is {rounds.min_clients}), and"
            f" rounds.num_participants to 0 or {MIN_GROUP} or more (it is {rounds.num_participants})"
        )


def protected_fold(
    strategy: Strategy, spec: ModelSpec, protection: Protection, start: RoundStart | None
) -> Fold:
    """An empty fold of the method for one round, protected."""
    fold = strategy.fold(spec)
    if protection == Protection() or start is None:
        return fold
    if protection.secure:
        assert isinstance(fold, MeanFold), "check() was called"
        if start.comes_masked:
            return MaskedFold(spec, strategy.weighting, fold.damping)
        return SecureFold(spec, strategy.weighting, start.round_num, start.secret, fold.damping)
    limit = protection.clip_norm * math.sqrt(start.share)
    clip = Clip(start.model, limit) if limit else None
    if protection.noise_multiplier:
        assert clip is not None, "Protection checks this"
        return PrivateFold(spec, replace(clip, limit=limit * _SLACK), protection, start)
    if protection.fold != "mean":
        assert isinstance(fold, MeanFold), "check() was called"
        trim = MEDIAN if protection.fold == "median" else protection.trim
        return RobustFold(spec, trim, fold.damping > 0, clip)
    return ClippedFold(fold, clip) if clip else fold


class ClippedFold:
    """Any fold, of updates whose change is at most so large."""

    def __init__(self, fold: Fold, clip: Clip) -> None:
        self._fold, self._clip = fold, clip

    def add(self, update: Update) -> None:
        factor = self._clip.factor(update.patches)
        patches = {name: self._clip.changed(name, patch, factor) for name, patch in update.patches.items()}
        self._fold.add(replace(update, patches=patches))

    def finish(self, model: Tensors, state: Tensors) -> Folded:
        return self._fold.finish(model, state)


class RobustFold:
    """The trimmed mean or the median of every value; every client that trained it counts the same.

    It keeps all updates until the end: an aggregator's are views of the files in its journal, which take no
    memory of the process; in a simulation they do. Compressed ones stay so until their tensor's turn comes.
    """

    def __init__(self, spec: ModelSpec, trim: float, absent_counts: bool, clip: Clip | None) -> None:
        self._trim, self._absent_counts, self._clip = trim, absent_counts, clip
        self._sound = MaskedMean({t.name: t.shape for t in spec.tensors})
        self._updates: list[tuple[Mapping[str, Patch], float]] = []

    def add(self, update: Update) -> None:
        self._sound.check(update.patches)
        factor = self._clip.factor(update.patches) if self._clip else 1.0
        self._updates.append((update.patches, factor))

    def finish(self, model: Tensors, state: Tensors) -> Folded:
        return Folded({name: self._next(name, old) for name, old in model.items()}, state)

    def _next(self, name: str, old: Array) -> Array:
        patches = [(sent[name], factor) for sent, factor in self._updates if name in sent]
        if not patches:
            return old
        num_absent = len(self._updates) - len(patches) if self._absent_counts else 0
        return trimmed_mean(old, patches, self._trim, num_absent)


class PrivateFold:
    """The old model, moved by the sum of the clipped changes with noise, over the expected number of clients.

    A tensor that a client did not send is a change of zero. Every value gets noise, also one that nobody
    trained: otherwise the model would show which were.
    """

    def __init__(self, spec: ModelSpec, clip: Clip, protection: Protection, start: RoundStart) -> None:
        self._clip, self._start = clip, start
        self._sigma = protection.noise_multiplier * protection.clip_norm
        self._num_expected = protection.num_expected
        self._never_changes = {t.name for t in spec.tensors if t.role is Role.FROZEN}
        self._sums = Sums(UNIT_BITS)
        self._sums.expect({t.name: t.shape for t in spec.tensors})

    def add(self, update: Update) -> None:
        factor = self._clip.factor(update.patches)
        self._sums.add({name: self._change(name, patch, factor) for name, patch in update.patches.items()}, 1.0)

    def _change(self, name: str, patch: Patch, factor: float) -> Patch:
        whole = self._clip.model[name]
        old = whole if patch.where is None else whole[patch.where]
        return Patch(np.subtract(patch.values, old, dtype=np.float64) * factor, patch.where)

    def finish(self, model: Tensors, state: Tensors) -> Folded:
        return Folded({name: self._next(name, old) for name, old in model.items()}, state)

    def _next(self, name: str, old: Array) -> Array:
        if name in self._never_changes:
            return old
        noise = gaussian(self._start.secret, old.size, "noise", self._start.round_num, name).reshape(old.shape)
        # On the grid of the sum: digits below it could tell noise and sum apart.
        noise = np.rint(noise * (self._sigma * 2.0**UNIT_BITS)) * 2.0**-UNIT_BITS
        sums = self._sums.tensors.get(name)
        total = sums.total() + noise if sums else noise
        return (old + total / self._num_expected).astype(old.dtype)


def repeatable_secret(seed: int) -> bytes:
    """For a simulation, which can be repeated and hides nothing."""
    return f"simulation {seed}".encode()
