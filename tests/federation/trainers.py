"""Trainers that agents under test build; a run names them as ``tests.federation.trainers:...``."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from fedel import testing
from fedel.core.memory_budget import whole_bytes
from fedel.job import RunConfig
from fedel.seeds import derive
from fedel.strategies.base import WrappedTrainer
from fedel.training.settings import Evaluator, HeldOut, TrainerSettings
from fedel.types import ModelSpec, Tensors, Trained, Trainer, TrainSpec
from tests.agents.trainers import FakeScore, score
from tests.strategies import fakes

_HELD_SECONDS = 330.0
_LOOK_SECONDS = 0.01


@lru_cache(maxsize=4)
def spec_of(scale: int = 1) -> ModelSpec:
    """The fake model with every side of every tensor ``scale`` times longer: 72 makes 8 MB."""
    plain = fakes.spec()
    longer = (replace(t, shape=tuple(side * scale for side in t.shape)) for t in plain.tensors)
    return replace(plain, tensors=tuple(longer))


@lru_cache(maxsize=4)
def clients_of(num_clients: int, scale: int = 1, memory_share: float = 0.0) -> dict[str, fakes.FakeTrainer]:
    """An uneven fleet; with ``memory_share``, held to that share of what the whole model takes."""
    spec = spec_of(scale)
    clients = fakes.fleet(num_clients, spec)
    if not memory_share:
        return clients
    use = testing.memory_use(spec, int(memory_share * whole_bytes(spec, testing.memory_use(spec))))
    return {name: replace(c, profile=replace(c.profile, memory=use)) for name, c in clients.items()}


def scale_of(run: RunConfig) -> int:
    return int(run.workload.model_options.get("scale", 1))


def memory_share_of(run: RunConfig) -> float:
    return float(run.workload.model_options.get("memory_share", 0.0))


def uneven(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    """The client of the uneven fleet that the data section names."""
    clients = clients_of(settings.data.of, scale_of(run), memory_share_of(run))
    trainer = clients[f"client-{settings.data.index}"]
    return trainer, score if settings.evaluate else None


@dataclass(frozen=True)
class OwnTest:
    """A test on data that only one client has."""

    client: str
    fails: bool = False

    def __call__(self, model: Tensors, average: Collection[int]) -> FakeScore:
        if self.fails:
            raise RuntimeError("planted: no test today")
        number = int(self.client.removeprefix("client-")) + 1
        found = score(model, average)
        return replace(found, accuracy=found.accuracy * number / (number + 1), loss=found.loss * number)

    def beside_training(self) -> OwnTest:
        return self


def holding_out(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None, HeldOut]:
    """As ``uneven``; client ``client-N`` holds ``N + 3`` samples out."""
    client = f"client-{settings.data.index}"
    fails = client == run.workload.model_options.get("fails")
    trainer, _ = uneven(run, settings)
    return trainer, None, HeldOut(OwnTest(client, fails), settings.data.index + 3)


class Gate:
    """Files in a folder through which a test sees, and holds, what trainers in other processes do."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self._seed = folder, seed
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, kind: str, client: str, round_num: int) -> Path:
        return self.folder / f"{kind}-{derive(self._seed, 'train', round_num, client)}"

    def hold(self, client: str, round_num: int) -> None:
        """Let the client begin to train in that round, but not end."""
        self._file("hold", client, round_num).touch()

    def fail(self, client: str, round_num: int) -> None:
        """Let the client's training raise an error in that round."""
        self._file("fail", client, round_num).touch()

    def release(self, client: str, round_num: int) -> None:
        self._file("hold", client, round_num).unlink()

    def times_trained(self, client: str, round_num: int) -> int:
        """How often the client began to train in that round, restarts included."""
        began = self._file("began", client, round_num)
        return began.stat().st_size if began.exists() else 0


class _Gated(WrappedTrainer):
    def __init__(self, trainer: Trainer, folder: Path) -> None:
        super().__init__(trainer)
        self._folder = folder

    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        with (self._folder / f"began-{job.seed}").open("a") as file:
            file.write(".")
        if (self._folder / f"fail-{job.seed}").exists():
            raise RuntimeError("planted")
        held, deadline = self._folder / f"hold-{job.seed}", time.monotonic() + _HELD_SECONDS
        while held.exists() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        try:
            return super().train(model, job)
        finally:
            testing._normal.cache_clear()  # a large model's noise would fill the memory


def gated(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    """Trains when the ``Gate`` of the folder in ``model_options.gate`` lets it."""
    trainer, evaluator = uneven(run, settings)
    return _Gated(trainer, Path(run.workload.model_options["gate"])), evaluator
