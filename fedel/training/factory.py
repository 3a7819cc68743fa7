"""From a run's configuration to a trainer on this device, and to the first model of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedel.data import Dataset, PartitionConfig, load_data
from fedel.data.model_input import ModelInput
from fedel.data.partition import hold_out, split
from fedel.errors import DataError, ProfileError
from fedel.job import RunConfig
from fedel.models import BlockModel
from fedel.models.registry import make
from fedel.seeds import derive
from fedel.strategies import build as build_strategy
from fedel.training.evaluate import Score, evaluate, own_batches
from fedel.training.initial import start_from_file
from fedel.training.profile_io import load_profile, save_profile
from fedel.training.profiler import cache_key, profile
from fedel.training.settings import DataPart, Evaluator, HeldOut, TrainerSettings
from fedel.training.trainer import TorchTrainer
from fedel.types import Array, ModelSpec, Tensors, TimingProfile, Trainer

_log = logging.getLogger(__name__)


def make_trainer(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None, HeldOut | None]:
    """The trainer of this client, what tests a model if it may, and the same on samples that it holds out.
    Weights come from the server."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    data = make_data(run, settings.data.root)
    model = make_model(run, data)
    indices, held = hold_out(part_of(data, settings.data), settings.data.held_out, settings.data.seed)
    source = ProfileSource(run, settings, model, data, indices)
    again = source.measure if settings.profile is None else None
    trainer = TorchTrainer(model, data, indices, source.find(), settings.device, again)
    beside = _Beside(run, data)
    test = ModelTest(model, data.test_batches, settings.device, beside) if settings.evaluate else None
    own = ModelTest(model, partial(own_batches, data, held), settings.device, beside)
    return trainer, test, HeldOut(own, len(held)) if len(held) else None


def initial_model(
    run: RunConfig, root: str = "", data: Dataset | None = None
) -> tuple[ModelSpec, dict[str, Array]]:
    """What a run starts from; the same on every machine for the same seed and file."""
    if data is None and not run.workload.input:
        data = make_data(run, root)
    model = first_model(run, data)
    return model.spec, model.tensors()


def first_model(run: RunConfig, data: Dataset | None) -> BlockModel:
    """The run's model with the values that it starts from: those of its seed, or of a file that the job names.

    Without data, the job says what the model takes.

    For the machine of the job's author: a job of somebody else must not make this one read a file.
    """
    own, model = _fresh(run, data)
    if run.workload.initial:
        start_from_file(run.workload, own, model)
    return model


def fresh_model(run: RunConfig, data: Dataset) -> BlockModel:
    """The run's model with the values that follow from its seed."""
    return _fresh(run, data)[1]


def _fresh(run: RunConfig, data: Dataset | None) -> tuple[nn.Module, BlockModel]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(run.seed, "initial model"))
        return _make(run, data)


def make_data(run: RunConfig, root: str = "") -> Dataset:
    """The job's data as it is here; refused if it is not what the job says."""
    data = load_data(run.workload.data, root or None, **run.workload.data_options)
    said = ModelInput.declared(run.workload)
    if said is not None and (wrong := said.objection_to(data)):
        raise DataError(
            f"the data '{data.name}' of this machine does not fit the job: {wrong}; mend the function that"
            " reads it here, or `input`, `input_dtype` and `classes` in the job's [workload]"
        )
    return data


def make_model(run: RunConfig, data: Dataset) -> BlockModel:
    """The run's model for this data, its values drawn from torch's current seed."""
    return _make(run, data)[1]


def _make(run: RunConfig, data: Dataset | None) -> tuple[nn.Module, BlockModel]:
    """What the job says about the model's input goes before what the data here says: one device of many may
    lack a class."""
    said = ModelInput.declared(run.workload)
    if said is not None:
        samples, num_classes = said.samples(2), len(said.classes)
    else:
        assert data is not None, "without data, the job says what the model takes"
        samples, num_classes = data.train_batch(np.arange(min(2, len(data.train))))[0], data.num_classes
    return make(
        run.workload.model,
        sample_input=torch.from_numpy(samples),
        num_classes=num_classes,
        **run.workload.model_options,
    )


def part_of(data: Dataset, part: DataPart) -> Array:
    """Indices of this client's samples."""
    if part.of == 1:
        return np.arange(len(data.train))
    config = PartitionConfig(part.method, part.of, part.alpha, part.balance, part.min_size)
    return split(data, config, part.seed)[part.index]


@dataclass(frozen=True)
class ProfileSource:
    """Where a client's timing profile comes from: a file, the cache of this device, or a measurement."""

    run: RunConfig
    settings: TrainerSettings
    model: BlockModel
    data: Dataset
    indices: Array

    def find(self) -> TimingProfile:
        if self.settings.profile is not None:
            return self._limited(load_profile(self.settings.profile, self.model.spec))
        if self._cached and self._cached.exists():
            try:
                return self._limited(load_profile(self._cached, self.model.spec))
            except ProfileError as error:
                _log.warning("measuring the timing profile again: %s", error)
        return self.measure()

    def measure(self) -> TimingProfile:
        """Measure on this device now, and keep the result."""
        data, work, settings = self.data, self.run.work, self.settings
        batch, rng = np.resize(self.indices, work.batch_size), np.random.default_rng(0)
        _log.info("measuring how long each tensor of %s takes to train here", self.model.spec.name)
        measured = profile(
            self.model,
            data.train_batch(batch, rng),
            work,
            settings.device,
            widths=self._widths,
            fetch=lambda: data.train_batch(batch, rng),
            limit_bytes=settings.memory_bytes,
        )
        if self._cached:
            save_profile(measured, self._cached)
        return self._limited(measured)

    def _limited(self, timing: TimingProfile) -> TimingProfile:
        """The profile with this device's limit of memory."""
        limit_bytes = self.settings.memory_bytes
        if timing.memory is None:
            if limit_bytes:
                _log.warning(
                    "the timing profile says nothing about memory, so memory_mb cannot be kept: measure it"
                    " again with this version of FedEL, and with a torch that has Kineto"
                )
            return timing
        return replace(timing, memory=replace(timing.memory, limit_bytes=limit_bytes))

    @cached_property
    def _widths(self) -> tuple[float, ...]:
        return tuple(w for w in build_strategy(self.run.strategy).widths if w < 1)

    @cached_property
    def _cached(self) -> Path | None:
        run, settings, spec = self.run, self.settings, self.model.spec
        if not settings.cache_dir:
            return None
        shape, threads = self.data.input_shape, torch.get_num_threads()
        key = cache_key(run, spec, shape, self._widths, settings.device, threads, settings.memory_bytes)
        return Path(settings.cache_dir) / f"profile-{key}.json"


@dataclass(frozen=True)
class _Beside:
    """A second model, made once it is needed: tests beside the training share it, because they take turns."""

    run: RunConfig
    data: Dataset

    @cached_property
    def model(self) -> BlockModel:
        return fresh_model(self.run, self.data)


@dataclass(frozen=True)
class ModelTest:
    """Tests a model on some data."""

    model: BlockModel
    """Scratch space, which it shares with the trainer."""
    batches: Callable[[], Iterator[tuple[Array, Array]]]
    device: str
    beside: _Beside

    def __call__(self, tensors: Tensors, average: Collection[int]) -> Score:
        self.model.load(tensors)
        return evaluate(self.model, self.batches(), self.device, average)

    def beside_training(self) -> ModelTest:
        """The same test with a model of its own."""
        return replace(self, model=self.beside.model)
