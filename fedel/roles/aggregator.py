"""The aggregator's part of a round: fold updates as they come, then make the next model."""

from __future__ import annotations

from dataclasses import dataclass

from fedel.core.importance import global_change
from fedel.errors import UpdateRefused
from fedel.types import ModelSpec, Strategy, Tensors, Update


@dataclass(frozen=True)
class Closed:
    """What came of a round."""

    model: Tensors
    state: Tensors
    """Server-side tensors of the strategy."""
    global_importance: dict[str, float]
    """Squared change of each tensor."""
    num_clients: dict[str, int]
    """Clients that trained each tensor."""


class RoundFold:
    """One round of one aggregator; with shards, ``spec`` holds this shard's tensors alone."""

    def __init__(self, strategy: Strategy, spec: ModelSpec) -> None:
        self._spec = spec
        self._fold = strategy.fold(spec)
        self._num_clients = {t.name: 0 for t in spec.tensors}
        self.clients: set[str] = set()

    def add(self, update: Update) -> None:
        """Fold an update in; ``UpdateRefused`` leaves everything as it was."""
        client = update.report.client
        if client in self.clients:
            raise UpdateRefused("duplicate", f"client '{client}' is in this round already")
        self._check(update)
        self._fold.add(update)
        self.clients.add(client)
        for name in update.patches:
            self._num_clients[name] += 1

    def _check(self, update: Update) -> None:
        for name, patch in update.patches.items():
            spec = self._spec.by_name.get(name)
            if spec is None:
                raise UpdateRefused("unknown_tensor", f"the model has no tensor '{name}'")
            if patch.values.dtype != spec.dtype:
                raise UpdateRefused("dtype", f"tensor '{name}' is {patch.values.dtype}, not {spec.dtype}")
            if patch.where is None and patch.values.shape != spec.shape:
                raise UpdateRefused("shape", f"tensor '{name}' is {patch.values.shape}, not {spec.shape}")

    def finish(self, model: Tensors, state: Tensors) -> Closed:
        folded = self._fold.finish(model, state)
        change = global_change(folded.model, model)
        return Closed(folded.model, folded.state, change, dict(self._num_clients))
