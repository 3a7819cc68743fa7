"""The mean of a method on an aggregator that gets masked updates: it adds, and sees the sum only at the end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedel.core.aggregation import MaskedMean
from fedel.core.secure_server import Opened, take_off
from fedel.core.secure_sum import Words, groups_of, refusal
from fedel.types import Folded, ModelSpec, Tensors, Update


def masked_spec(spec: ModelSpec) -> ModelSpec:
    """What a masked update looks like: of each tensor a row of whole numbers, with the weight as the last."""
    tensors = (replace(tensor, shape=(tensor.size + 1,), dtype="uint64") for tensor in spec.tensors)
    return replace(spec, tensors=tuple(tensors))


class MaskedFold:
    def __init__(self, spec: ModelSpec, weighting: str, damping: float = 0.0) -> None:
        """``spec`` as the model is, not as updates are."""
        self._by_samples = weighting == "samples"
        self._shapes = {t.name: t.shape for t in spec.tensors}
        self._mean = MaskedMean(self._shapes, weighted=self._by_samples, damping=damping)
        self._sums: dict[str, Words] = {}
        self._sent: dict[str, set[str]] = {}
        self._weights: dict[str, int] = {}
        """By client, from its join: what the weights in a sum must come to."""
        self.num_clients: dict[str, int] = {}
        """Clients in the sum of each tensor."""

    def add(self, update: Update) -> None:
        report = update.report
        for name, patch in update.patches.items():
            if name in self._sums:
                self._sums[name] += patch.values
            else:
                self._sums[name] = patch.values.astype(np.uint64)
        self._sent[report.client] = set(update.patches)
        self._weights[report.client] = report.num_samples if self._by_samples else 1

    def unmask(self, secrets: Opened) -> None:
        """Refused if clients sent other tensors than they named, or the sum cannot be right."""
        groups = {t: group for t, group in groups_of(secrets.named).items() if t in self._shapes}
        for client, sent in self._sent.items():
            if sent != {tensor for tensor, group in groups.items() if client in group}:
                raise refusal(f"client '{client}' sent other tensors than it named: the round is lost")
        for weight in self._weights.values():
            self._mean.add({}, weight)  # who is in the round, whatever came to a sum
        take_off(secrets, self._sums)
        for tensor, words in self._sums.items():
            came = [client for client in groups[tensor] if client in self._sent]
            weight = sum(self._weights[client] for client in came)
            if int(words[-1]) != weight:
                raise refusal(
                    f"the weights in the sum of tensor '{tensor}' are not those of its clients: one of"
                    f" {', '.join(came)} did not keep to the protocol, and the round is lost"
                )
            self._mean.add_sum(tensor, words[:-1].view(np.int64), self._shapes[tensor], weight)
            self.num_clients[tensor] = len(came)
        self._sums = {}

    def finish(self, model: Tensors, state: Tensors) -> Folded:
        return Folded(self._mean.finish(model), state)
