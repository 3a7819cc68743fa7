"""Trainers for agents under test, named in a run's configuration as ``tests.agents.trainers:...``."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, replace

from fedel.core.memory_budget import step_bytes
from fedel.errors import DataError
from fedel.job import RunConfig
from fedel.strategies.base import WrappedTrainer
from fedel.testing import memory_use
from fedel.training.settings import Evaluator, TrainerSettings
from fedel.types import Tensors, TimingProfile, Trained, Trainer, TrainSpec, Window
from tests.strategies.fakes import fleet

entered = threading.Event()
"""Set when a held trainer begins to train."""
release = threading.Event()
"""Lets a held trainer continue."""


@dataclass(frozen=True)
class FakeScore:
    accuracy: float
    loss: float = 0.5
    num_targets: int = 100


def score(model: Tensors, average: Collection[int]) -> FakeScore:
    """Something that depends on the model, and on whether exits are averaged."""
    total = float(sum(values.sum() for values in model.values()))
    return FakeScore(abs(total) % 1, loss=1.0 if average else 0.5)


def fake(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    """The client of the uneven fleet that the data section names; parts of it differ in everything."""
    clients = list(fleet().values())
    return clients[settings.data.index], score if settings.evaluate else None


class _Held(WrappedTrainer):
    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        entered.set()
        release.wait(30)
        return super().train(model, job)


def held(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    """Trains once it is released."""
    trainer, evaluator = fake(run, settings)
    return _Held(trainer), evaluator


class _Failing(WrappedTrainer):
    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        raise DataError("the disk with the samples is gone; put it back")


def failing(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    trainer, evaluator = fake(run, settings)
    return _Failing(trainer), evaluator


class _Counting(WrappedTrainer):
    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        calls.append(job.seed)
        return replace(super().train(model, job), seconds=0.5)


calls: list[int] = []
"""Seeds of the jobs of a counting trainer."""


def counting(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    trainer, evaluator = fake(run, settings)
    return _Counting(trainer), evaluator


EXITS: dict[str, type[BaseException]] = {
    "exiting": SystemExit,
    "interrupting": KeyboardInterrupt,
    "exhausted": StopIteration,
}


class _Exiting(WrappedTrainer):
    def __init__(self, trainer: Trainer, how: type[BaseException]) -> None:
        super().__init__(trainer)
        self._how = how

    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        raise self._how


def exiting(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    trainer, evaluator = fake(run, settings)
    return _Exiting(trainer, EXITS[run.trainer.rpartition(":")[2]]), evaluator


interrupting = exhausted = exiting


def broken(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    raise DataError("cifar10 is not here; run `fedel data get cifar10`")


made: list[RunConfig] = []
"""The runs for which a noted trainer was built."""


def noted(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    made.append(run)
    release.wait(30)
    return fake(run, settings)


class _Verbose(WrappedTrainer):
    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        raise DataError("\x1b[2J line\n" * 100_000)


def verbose(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    trainer, evaluator = fake(run, settings)
    return _Verbose(trainer), evaluator


class _BesideTraining:
    """Tests in the thread that trains, and beside it once ``release_test`` is set."""

    def __call__(self, model: Tensors, average: Collection[int]) -> FakeScore:
        threads.append(threading.current_thread().name)
        return score(model, average)

    def beside_training(self) -> Evaluator:
        threads.append(threading.current_thread().name)
        return self._held

    def _held(self, model: Tensors, average: Collection[int]) -> FakeScore:
        entered_test.set()
        release_test.wait(30)
        return self(model, average)


threads: list[str] = []
"""Where an evaluator for beside the training was made and called."""
entered_test = threading.Event()
release_test = threading.Event()


def beside(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    """A held trainer whose models are tested meanwhile."""
    trainer, _ = held(run, settings)
    return trainer, _BesideTraining()


memory_there = 0
"""Bytes that a device with little memory has."""
memory_asked: list[int] = []
"""Bytes of everything that was tried on it."""


class _SmallMemory(WrappedTrainer):
    @property
    def profile(self) -> TimingProfile:
        return replace(super().profile, memory=memory_use(self.spec))

    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        use, window = memory_use(self.spec), Window(job.end, max(job.exits))
        memory_asked.append(step_bytes(self.spec, use, job.selected, window))
        if memory_asked[-1] > memory_there:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return super().train(model, job)


def small_memory(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    """Fails, as torch does, where a step needs more than ``memory_there``."""
    memory_asked.clear()
    trainer, evaluator = fake(run, settings)
    return _SmallMemory(trainer), evaluator


class _Measuring(WrappedTrainer):
    """Another profile each time that it is measured."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._profile = trainer.profile

    @property
    def profile(self) -> TimingProfile:
        return self._profile

    def profile_again(self) -> bool:
        self._profile = self._profile.scaled(2.0)
        return True


def measuring(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    trainer, evaluator = fake(run, settings)
    return _Measuring(trainer), evaluator
