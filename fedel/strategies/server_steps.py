"""What ``[server]`` does with a folded round: momentum, and a mean over versions that is tested and published.

Both keep tensors of their own beside those of the method, so they go from round to round as those do: stored
with the version, kept by each aggregator for its own part of the model, computed again by an audit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedel.core.aggregation import mixed
from fedel.job import Server
from fedel.types import Array, Fold, Folded, Tensors

PREFIX = "server/"
AVERAGE = PREFIX + "average/"
MOMENTUM = PREFIX + "momentum/"


@dataclass(frozen=True)
class ServerSteps:
    """Of one round. Each tensor is computed by itself, so a caller may finish them one at a time."""

    server: Server = field(default_factory=Server)
    round_num: int = 0
    statistics: frozenset[str] = frozenset()
    """Of batch norms: they are averaged as weights are, but have no momentum."""

    def finish(self, fold: Fold, model: Tensors, state: Tensors) -> Folded:
        """The fold's result, moved on and averaged."""
        if self.server == Server():
            return fold.finish(model, state)
        kept = {name: values for name, values in state.items() if name.startswith(PREFIX)}
        folded = fold.finish(model, {name: state[name] for name in state.keys() - kept.keys()})
        new = dict(folded.model)
        for name, old in model.items():
            if self.server.momentum and name not in self.statistics:
                new[name] = self._moved(name, new[name], old, kept)
            if self.server.average:
                self._average(name, new[name], old, kept)
        return Folded(new, {**folded.state, **kept})

    def _moved(self, name: str, folded: Array, old: Array, kept: dict[str, Array]) -> Array:
        """A value that the round changed goes on by its momentum; any other stays, and so does its momentum."""
        if folded is old:
            return old
        before = kept.get(MOMENTUM + name, np.zeros_like(old))
        change = np.subtract(folded, old, dtype=np.float64)
        speed = (self.server.momentum * before.astype(np.float64) + change).astype(old.dtype)
        is_changed = folded != old
        kept[MOMENTUM + name] = np.where(is_changed, speed, before)
        return np.where(is_changed, np.add(old, speed, dtype=np.float64).astype(old.dtype), old)

    def _average(self, name: str, new: Array, old: Array, kept: dict[str, Array]) -> None:
        """Of a tensor that no round has changed so far there is nothing to average."""
        if new is old and AVERAGE + name not in kept:
            return
        before = kept.get(AVERAGE + name, old)
        kept[AVERAGE + name] = mixed(new, before, newest_part(self.server.average, self.round_num))


def newest_part(average: float, round_num: int) -> float:
    """How much of the mean is the version that the round made.

    As in Adam, the mean is over the rounds so far: the first version, of random values, is never in it, and
    the version of the first round is it.

    >>> [round(newest_part(0.75, round_num), 3) for round_num in (0, 1, 2, 30)]
    [1.0, 0.571, 0.432, 0.25]
    """
    return (1 - average) / (1 - average ** (round_num + 1))


def averages(state: Tensors) -> Mapping[str, Array]:
    """The averaged tensors by name; those of the model that are not among them are as in the model."""
    return {name.removeprefix(AVERAGE): state[name] for name in state if name.startswith(AVERAGE)}
