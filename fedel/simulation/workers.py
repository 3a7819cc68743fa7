"""What a worker does: one client's task, or one part of a test. Any worker gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fedel.roles.edge import KeptMemories, recall, run_task
from fedel.simulation.pace import VirtualPace
from fedel.simulation.together import Wanted, all_of
from fedel.strategies.base import CorrectedTrainer, needed_by
from fedel.types import (
    CLOCK_PACE,
    Memory,
    ModelSpec,
    SentUpdate,
    Strategy,
    Task,
    Tensors,
    Trained,
    Trainer,
)


@dataclass(frozen=True)
class ClientTask:
    """A task, and the state of its client: the last round that counted and what it remembers of it."""

    task: Task
    accepted_round: int
    memory: Memory
    drift: float = 1.0
    """How many times slower than its profile the device is now."""


@dataclass(frozen=True)
class Together:
    """Tasks that a worker may train side by side."""

    tasks: tuple[ClientTask, ...]


@dataclass(frozen=True)
class Outcome:
    update: SentUpdate
    memory: Memory
    """What the client remembers if the update counts."""
    needed: frozenset[str]
    """The tensors of the model that it used."""


@dataclass(frozen=True)
class EvaluationPart:
    """One of ``num_parts`` parts of the test set: the parts, not the workers, decide how sums are rounded."""

    part: int
    num_parts: int
    limit: int
    """Samples of the whole test; 0 takes all."""
    average: tuple[int, ...] = ()
    """Exits whose mean logits are tested; empty tests the last exit."""
    each_exit: bool = False
    """Test every exit by itself instead."""


@dataclass(frozen=True)
class OwnTest:
    """A test on the samples that one client holds out."""

    client: str
    average: tuple[int, ...] = ()
    """As in ``EvaluationPart``."""


@dataclass(frozen=True)
class Tally:
    """The result of one part of a test."""

    num_correct: int
    loss_sum: float
    num_targets: int


class Workload(Protocol):
    """A model and its clients, as a worker holds them: once, whatever the number of clients."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def num_test_samples(self) -> int:
        """0 where there is nothing to test on."""
        ...

    def prepare(self) -> None:
        """Called once in each worker, before anything else."""
        ...

    def trainer(self, client: str) -> Trainer: ...

    def train_all(self, wanted: Sequence[Wanted]) -> Sequence[Trained]:
        """Trainings of several clients, side by side where that is possible."""
        ...

    def test(self, model: Tensors, part: EvaluationPart) -> Sequence[Tally]:
        """One entry, or one for each exit with ``each_exit``."""
        ...

    def test_own(self, model: Tensors, test: OwnTest) -> tuple[float, float]:
        """Accuracy and loss, in the bits that a device gives."""
        ...


class Worker:
    def __init__(self, strategy: Strategy, workload: Workload) -> None:
        self._strategy = strategy
        self.workload = workload

    def perform(
        self, item: ClientTask | Together | EvaluationPart | OwnTest, model: Tensors
    ) -> Outcome | Sequence[Outcome] | Sequence[Tally] | tuple[float, float]:
        if isinstance(item, EvaluationPart):
            return self.workload.test(model, item)
        if isinstance(item, OwnTest):
            return self.workload.test_own(model, item)
        if isinstance(item, ClientTask):
            return self._fit(item, model, self.workload.trainer(item.task.client))
        fits = [partial(self._fit, task, model) for task in item.tasks]
        trainers = [self.workload.trainer(task.task.client) for task in item.tasks]
        return all_of(fits, trainers, self.workload.train_all)

    def _fit(self, item: ClientTask, model: Tensors, client: Trainer) -> Outcome:
        strategy, task, trainer = self._strategy, item.task, self._trainer(item, client)
        memories = KeptMemories()
        memories.stage(item.accepted_round, item.memory)
        memory = recall(item.accepted_round, Memory(), memories)
        needed = needed_by(strategy, task, memory, trainer)
        part = {name: model[name] for name in needed}
        update = run_task(strategy, task, memory, part, trainer, memories)
        after = memories.load(task.round_num)
        assert after is not None
        return Outcome(update, after, needed)

    def _trainer(self, item: ClientTask, trainer: Trainer) -> Trainer:
        task, strategy = item.task, self._strategy
        if task.pace == CLOCK_PACE and strategy.fits_steps:
            trainer = VirtualPace(trainer, task, strategy.budget_scope, item.drift)
        return CorrectedTrainer(trainer, task.speed)
