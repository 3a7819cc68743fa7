"""A control, not a method of the paper: FedAvg whose slow clients make fewer steps, so that all keep T_th.

It takes FedEL's time with no windows and no selection, and early exits only where ``answer`` asks for them.
A method that shortens rounds by training less of the model should do better than this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedel.core.budgeted import Prices, fill
from fedel.core.timing import SCOPES
from fedel.strategies.base import check_scope, train_spec_for, update_of, whole
from fedel.strategies.fedavg import FedAvg
from fedel.strategies.inner_exits import InnerExits, answering, check_answer
from fedel.types import Memory, ModelSpec, Task, Tensors, Trainer, Update


@dataclass(frozen=True)
class FedAvgCut(FedAvg):
    name: ClassVar[str] = "fedavg-cut"

    budget_scope: str = "backward"
    """What counts against T_th: ``backward``, as in the paper's simulation; ``train``, the whole step; or
    ``round``, all that a client does in a round: download, steps, upload."""
    answer: float = 0.0
    """Share of the exits that answer together, as in FedEL: to tell what they bring without windows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scope(self.budget_scope, SCOPES)
        check_answer(self.answer)

    def exits_to_average(self, spec: ModelSpec) -> tuple[int, ...]:
        return answering(spec, self.answer)

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        if self.answer:
            trainer = InnerExits(trainer, self.exits_to_average(trainer.spec))
        prices, window = Prices.of(task, trainer, self.budget_scope), whole(trainer.spec)
        choice = fill(prices, window, {t.name for t in trainer.spec.weights}, fit_steps=True)
        steps, share = min((choice.num_steps, choice.last_share), (prices.num_steps, 1.0))
        train_spec = train_spec_for(task, trainer, choice.selected, window, num_steps=steps, last_share=share)
        train_spec = replace(train_spec, detached=bool(self.answer))
        trained = trainer.train(model, train_spec)
        cost, over = prices.step(choice.selected, window), not choice.in_budget
        return update_of(task, model, trainer, train_spec, trained, cost, over_budget=over), memory
