"""The next version of a model: the fold of a round, on top of the version that the round started from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedel.errors import UpdateRefused, VersionRefused
from fedel.roles.aggregator import Closed, RoundFold
from fedel.types import Array, ModelSpec, Tensors
from fedel_aggregator.errors import damaged
from fedel_aggregator.versions import Meta, Versions


@dataclass(frozen=True)
class Written:
    """A version whose tensors are written."""

    crc32: dict[str, int]
    changed: dict[str, int]
    importance: list[float]
    """Squared change of each tensor, in the model's order."""
    num_clients: list[int]
    state: Tensors


@dataclass(frozen=True)
class NextVersion:
    run: str
    spec: ModelSpec
    versions: Versions
    before: Meta
    """The version that the round started from; it has the round's number."""

    def write(self, fold: RoundFold) -> Written:
        """Write its tensors, one at a time: the whole model is never in memory."""
        before, version, versions = self.before, self.before.version + 1, self.versions
        crc32, changed, importance, num_clients = {}, {}, [], []
        state: Tensors = versions.read_state(before)
        shapes = [(t.name, t.shape) for t in self.spec.tensors]
        with versions.open(before.version) as old_file, versions.write(version, shapes) as writer:
            for name, _ in shapes:
                old = old_file.mapped(name, before.crc32[name])
                closed = self._finish(fold, name, old, state)
                new, state = closed.model[name], closed.state
                importance.append(closed.global_importance[name])
                crc32[name] = writer.put(name, new)
                moved = importance[-1] > 0 or not _same_bits(new, old)
                changed[name] = version if moved else before.changed[name]
                num_clients.append(closed.num_clients[name])
        for name, values in state.items():
            if not np.isfinite(values).all():
                raise self._not_finite(f"the strategy's tensor '{name}'")
        return Written(crc32, changed, importance, num_clients, state)

    def _finish(self, fold: RoundFold, name: str, old: Array, state: Tensors) -> Closed:
        """The next values of a tensor; refused if they are not finite."""
        try:
            with np.errstate(all="ignore"):
                closed = fold.finish({name: old}, state)
        except (UpdateRefused, ArithmeticError) as error:
            raise self._not_finite(f"tensor '{name}' ({error})") from None
        except ValueError as error:
            if not state:
                raise
            path = self.versions.state_path(self.before.version)
            raise damaged("version file", path, f"it does not fit the strategy ({error})") from None
        # The old values are finite, so the sum of all squared changes is finite only if the new ones are.
        if not math.isfinite(closed.global_importance[name]):
            raise self._not_finite(f"tensor '{name}'")
        return closed

    def _not_finite(self, what: str) -> VersionRefused:
        number = self.before.version
        return VersionRefused(
            "not_finite",
            f"round {number} of run '{self.run}': the next version would hold NaN or Inf in {what},"
            f" so version {number} stays: training diverged, try a lower learning rate",
        )


def _same_bits(new: Array, old: Array) -> bool:
    return new is old or bool(np.array_equal(new.view(np.uint32), old.view(np.uint32)))
