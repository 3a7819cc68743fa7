"""A torch model and its data, shared by all the clients of a worker."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import torch

from fedel.data.dataset import Dataset
from fedel.models.blocks import BlockModel
from fedel.simulation.together import Wanted
from fedel.simulation.workers import EvaluationPart, OwnTest, Tally
from fedel.training.evaluate import Score, evaluate, evaluate_exits, own_batches
from fedel.training.stacked import Request, kind, train_together
from fedel.training.trainer import TorchTrainer
from fedel.types import Array, ModelSpec, Tensors, TimingProfile, Trained

TEST_BATCH = 250


class TorchWorkload:
    """One model and one data set; a client is its samples and its profile."""

    def __init__(
        self,
        model: BlockModel,
        data: Dataset,
        parts: Mapping[str, Array],
        profiles: Mapping[str, TimingProfile],
        device: str = "cpu",
        compute: str = "exact",
        held_out: Mapping[str, Array] | None = None,
    ) -> None:
        """``parts`` are what clients train on, ``held_out`` what they test on."""
        self._held_out = held_out or {}
        self._model, self._data, self._device, self._compute = model, data, device, compute
        self._parts, self._profiles = parts, profiles
        self._trainers: dict[str, TorchTrainer] = {}
        # The first optimiser of a process makes torch import for seconds: here, once, not in every worker.
        torch.optim.SGD([torch.zeros(1)])

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def num_test_samples(self) -> int:
        return len(self._data.test)

    def prepare(self) -> None:
        """One thread per worker: with two, busy processes slow each other down, and sums differ."""
        torch.set_num_threads(1)

    def trainer(self, client: str) -> TorchTrainer:
        if client not in self._trainers:
            self._trainers[client] = TorchTrainer(
                self._model,
                self._data,
                self._parts[client],
                self._profiles[client],
                self._device,
                compute=self._compute,
            )
        return self._trainers[client]

    def train_all(self, wanted: Sequence[Wanted]) -> Sequence[Trained]:
        kinds: dict[Hashable, list[int]] = {}
        requests: list[Request] = []
        for place, each in enumerate(wanted):
            assert isinstance(each.trainer, TorchTrainer)
            requests.append(Request(each.trainer, each.model, each.train_spec))
            kinds.setdefault(kind(requests[-1]) or place, []).append(place)
        results: dict[int, Trained] = {}
        for places in kinds.values():
            some = [requests[place] for place in places]
            alone = len(some) == 1
            done = [some[0].trainer.train(some[0].model, some[0].train_spec)] if alone else train_together(some)
            results |= zip(places, done, strict=True)
        return [results[place] for place in range(len(wanted))]

    def test(self, model: Tensors, part: EvaluationPart) -> Sequence[Tally]:
        self._model.load(model)
        batches = self._batches(part)
        if part.each_exit:
            scores = evaluate_exits(self._model, batches, self._device, self._compute)
            return [_tally(score) for score in scores]
        return [_tally(evaluate(self._model, batches, self._device, part.average, self._compute))]

    def test_own(self, model: Tensors, test: OwnTest) -> tuple[float, float]:
        self._model.load(model)
        batches = own_batches(self._data, self._held_out[test.client])
        score = evaluate(self._model, batches, self._device, test.average, self._compute)
        return score.accuracy, score.loss

    def _batches(self, part: EvaluationPart) -> Iterator[tuple[Array, Array]]:
        test, total = self._data.test, self.num_test_samples
        wanted = min(part.limit or total, total)
        rows = np.array_split(np.linspace(0, total - 1, wanted).astype(int), part.num_parts)[part.part]
        for start in range(0, len(rows), TEST_BATCH):
            batch = rows[start : start + TEST_BATCH]
            yield self._data.transform(test.x[batch], test.y[batch], None)


def _tally(score: Score) -> Tally:
    number = score.num_targets
    return Tally(round(score.accuracy * number), score.loss * number, number)
