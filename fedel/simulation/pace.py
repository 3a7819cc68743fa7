"""A trainer on the virtual clock: it ends when T_th is over, as an agent does on a real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedel.core.budgeted import Prices
from fedel.strategies.base import CorrectedTrainer, WrappedTrainer
from fedel.types import LocalWork, Task, Tensors, Trained, Trainer, TrainSpec, Window


class VirtualPace(WrappedTrainer):
    """Makes as many steps as the device has time for, which is ``drift`` times slower than its profile says."""

    def __init__(self, trainer: Trainer, task: Task, scope: str, drift: float) -> None:
        super().__init__(trainer)
        # Seconds as they pass, not as earlier rounds make one expect them.
        slower = replace(task.speed, slowness=drift, probe_slowness=drift)
        self._prices = Prices.of(replace(task, speed=slower), CorrectedTrainer(trainer, slower), scope)
        self._spent = 0.0

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        self._spent += self._prices.probe(window).total("train")
        return self._trainer.probe(model, window, work, seed)

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        prices, window = self._prices, Window(train_spec.end, max(train_spec.exits))
        room = prices.round_seconds - self._spent - prices.once_seconds(train_spec.selected, window)
        self._spent = 0.0
        steps, share = prices.steps_in(room, prices.step(train_spec.selected, window).total("train"))
        return self._trainer.train(model, replace(train_spec, num_steps=steps, last_share=share))
