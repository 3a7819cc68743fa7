"""A trainer that reports what it is about to train, and stops between its steps once the task is given up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fedel.strategies.base import WrappedTrainer
from fedel.types import LocalWork, Tensors, Trained, Trainer, TrainSpec, Window

OnTrain = Callable[[Window, tuple[str, ...]], None]
"""Called with the window and the selected tensors when training begins."""


class WatchedTrainer(WrappedTrainer):
    """``check`` raises once nobody wants the result; it is called before and after whatever takes long."""

    def __init__(self, trainer: Trainer, check: Callable[[], None], on_train: OnTrain) -> None:
        super().__init__(trainer)
        self._check, self._on_train = check, on_train

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        self._check()
        return self._trainer.probe(model, window, work, seed)

    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        self._check()
        selected = tuple(t.name for t in self.spec.weights if t.name in job.selected)
        self._on_train(Window(job.end, max(job.exits)), selected)
        trained = self._trainer.train(model, replace(job, pace=_Checked(job, self._check)))
        self._check()
        return trained


@dataclass(frozen=True)
class _Checked:
    """The pace of a training, with a look before every step whether it is still wanted."""

    train_spec: TrainSpec
    check: Callable[[], None]

    def next_share(self, num_done: int) -> float:
        self.check()
        return self.train_spec.next_share(num_done)
