"""From a run's configuration to a trainer on this device, and to the first model of a run."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch

from fedel.data import Dataset, PartitionConfig, load_data
from fedel.data.partition import split
from fedel.errors import ProfileError
from fedel.job import RunConfig
from fedel.models import BlockModel, build
from fedel.seeds import derive
from fedel.strategies import build as build_strategy
from fedel.training.evaluate import Score, evaluate
from fedel.training.profile_io import load_profile, save_profile
from fedel.training.profiler import cache_key, profile
from fedel.training.settings import DataPart, Evaluator, TrainerSettings
from fedel.training.trainer import TorchTrainer
from fedel.types import Array, ModelSpec, Tensors, TimingProfile, Trainer

_log = logging.getLogger(__name__)


def make_trainer(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    """The trainer of this client, and what tests a model if it may. Weights come from the server."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    data = make_data(run, settings.data.root)
    model = make_model(run, data)
    indices = part_of(data, settings.data)
    timing = profile_of(run, settings, model, data, indices)
    trainer = TorchTrainer(model, data, indices, timing, settings.device)
    return trainer, _evaluator(model, data, settings.device) if settings.evaluate else None


def initial_model(run: RunConfig, root: str = "") -> tuple[ModelSpec, dict[str, Array]]:
    """What a run starts from; the same on every machine for the same seed."""
    model = fresh_model(run, make_data(run, root))
    return model.spec, model.tensors()


def fresh_model(run: RunConfig, data: Dataset) -> BlockModel:
    """The run's model with the values that it starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(run.seed, "initial model"))
        return make_model(run, data)


def make_data(run: RunConfig, root: str = "") -> Dataset:
    return load_data(run.workload.data, root or None, **run.workload.data_options)


def make_model(run: RunConfig, data: Dataset) -> BlockModel:
    """The run's model for this data, its values drawn from torch's current seed."""
    sample = torch.from_numpy(data.train_batch(np.arange(min(2, len(data.train))))[0])
    return build(
        run.workload.model, sample_input=sample, num_classes=data.num_classes, **run.workload.model_options
    )


def part_of(data: Dataset, part: DataPart) -> Array:
    """Indices of this client's samples."""
    if part.of == 1:
        return np.arange(len(data.train))
    config = PartitionConfig(part.method, part.of, part.alpha, part.balance, part.min_size)
    return split(data, config, part.seed)[part.index]


def profile_of(
    run: RunConfig, settings: TrainerSettings, model: BlockModel, data: Dataset, indices: Array
) -> TimingProfile:
    """The profile given, the one measured before on this device, or one measured now."""
    if settings.profile is not None:
        return load_profile(settings.profile, model.spec)
    widths = tuple(w for w in build_strategy(run.strategy).widths if w < 1)
    threads = torch.get_num_threads()
    key = cache_key(run, model.spec, data.input_shape, widths, settings.device, threads)
    kept = settings.cache_dir and settings.cache_dir / f"profile-{key}.json"
    if kept and kept.exists():
        try:
            return load_profile(kept, model.spec)
        except ProfileError as error:
            _log.warning("measuring the timing profile again: %s", error)
    batch = np.resize(indices, run.work.batch_size)
    rng = np.random.default_rng(0)
    _log.info("measuring how long each tensor of %s takes to train here; this is done once", model.spec.name)
    measured = profile(
        model,
        data.train_batch(batch, rng),
        run.work,
        settings.device,
        widths=widths,
        fetch=lambda: data.train_batch(batch, rng),
    )
    if kept:
        save_profile(measured, Path(kept))
    return measured


def _evaluator(model: BlockModel, data: Dataset, device: str) -> Evaluator:
    def test(tensors: Tensors, average: Collection[int]) -> Score:
        model.load(tensors)
        return evaluate(model, data.test_batches(), device, average)

    return test
