"""FedNova (Wang et al., 2020) around any method: updates are divided by their effective steps, then averaged.

Clients that take more local steps, because they hold more data or are faster, no longer pull the model towards
their own optimum. With masks the normalisation is done tensor by tensor (algorithms 12.5). Batch-norm
statistics are not sums of steps and are averaged plainly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedel.core.aggregation import MaskedMean, NormalisedMean
from fedel.strategies.wrapper import Wrapper
from fedel.types import Fold, Folded, ModelSpec, Role, Tensors, Update


@dataclass(frozen=True)
class FedNova(Wrapper):
    name: ClassVar[str] = "fednova"

    def fold(self, spec: ModelSpec) -> Fold:
        return _NovaFold(spec, self.weighting, self.damping)


class _NovaFold:
    def __init__(self, spec: ModelSpec, weighting: str, damping: float) -> None:
        shapes = {t.name: t.shape for t in spec.tensors}
        self._by_samples = weighting == "samples"
        self._statistics = {t.name for t in spec.tensors if t.role is Role.BUFFER}
        self._changes = NormalisedMean(shapes, damping)
        self._plain = MaskedMean(shapes, weighted=self._by_samples, damping=damping)

    def add(self, update: Update) -> None:
        report = update.report
        weight = report.num_samples if self._by_samples else 1
        trained = {n: p for n, p in update.patches.items() if n not in self._statistics}
        statistics = {n: p for n, p in update.patches.items() if n in self._statistics}
        self._plain.check(statistics, weight)
        self._changes.add(trained, weight, report.effective_steps)
        self._plain.add(statistics, weight)

    def finish(self, model: Tensors, state: Tensors) -> Folded:
        return Folded(self._plain.finish(self._changes.finish(model)), state)
