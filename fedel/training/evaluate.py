"""How good a model is on test data: as its strategy uses it, and each exit by itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedel.data.dataset import IGNORE, Dataset
from fedel.models.blocks import BlockModel
from fedel.training.batches import to_torch
from fedel.training.objective import cross_entropy
from fedel.types import Array

OWN_BATCH = 256


@dataclass(frozen=True)
class Score:
    """Means over all targets: samples, or masked tokens of a text."""

    accuracy: float
    loss: float
    num_targets: int

    @property
    def perplexity(self) -> float:
        """What a language model is judged by; infinite where it no longer fits a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass
class _Tally:
    correct: int = 0
    loss: float = 0.0
    targets: int = 0

    def add(self, logits: Tensor, y: Tensor) -> None:
        counted = y != IGNORE
        number = int(counted.sum())
        self.correct += int(((logits.argmax(-1) == y) & counted).sum())
        self.loss += float(cross_entropy(logits, y)[0].double()) * number
        self.targets += number

    def score(self) -> Score:
        number = max(1, self.targets)
        return Score(self.correct / number, self.loss / number, self.targets)


def own_batches(data: Dataset, rows: Array) -> Iterator[tuple[Array, Array]]:
    """Training samples that a client holds out, not augmented; the same in a simulation and on a device."""
    for start in range(0, len(rows), OWN_BATCH):
        yield data.train_batch(rows[start : start + OWN_BATCH])


def evaluate(
    model: BlockModel,
    batches: Iterable[tuple[Array, Array]],
    device: str | torch.device = "cpu",
    average: Collection[int] = (),
    compute: str = "exact",
) -> Score:
    """The model as its strategy uses it: mean logits of the exits after the blocks ``average``
    (``Strategy.exits_to_average``), or the whole network with its own classifier where there are none."""
    tally = _Tally()
    with torch.no_grad():
        model.to(device).eval()
        for x, y in (to_torch(batch, device, compute) for batch in batches):
            tally.add(_mean_logits(model, x, average) if average else model(x), y)
    return tally.score()


def evaluate_exits(
    model: BlockModel,
    batches: Iterable[tuple[Array, Array]],
    device: str | torch.device = "cpu",
    compute: str = "exact",
) -> list[Score]:
    """Every exit by itself, deepest last: a diagnostic, in one pass."""
    tallies = [_Tally() for _ in range(model.spec.num_blocks)]
    with torch.no_grad():
        model.to(device).eval()
        for x, y in (to_torch(batch, device, compute) for batch in batches):
            for tally, logits in zip(tallies, model.all_exits(x), strict=True):
                tally.add(logits, y)
    return [tally.score() for tally in tallies]


def _mean_logits(model: BlockModel, x: Tensor, exits: Collection[int]) -> Tensor:
    logits = model.all_exits(x)
    return torch.stack([logits[block - 1] for block in exits]).mean(0)
