"""A training that gets only the tensors it needs: the same bits as with the whole model, and nothing stale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fedel.data.dataset import Dataset, Split
from fedel.data.transforms import Plain
from fedel.errors import ModelError
from fedel.models.albert import albert
from fedel.models.blocks import BlockModel
from fedel.models.resnet50 import resnet50
from fedel.models.vgg16 import vgg16
from fedel.strategies.depthfl import Distillation
from fedel.strategies.fedprox import Pull
from fedel.training.evaluate import evaluate
from fedel.training.trainer import TorchTrainer
from fedel.types import Array, BlockTime, LocalWork, Patch, TensorTime, TimingProfile, TrainSpec, Window

from .toys import make_data, make_model, trainer_of, whole

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "embedding_size": 8,
    "hidden_size": 24,
    "num_layers": 4,
    "num_heads": 3,
    "ffn_size": 40,
    "max_length": 16,
    "bottleneck": 8,
}
WORK = LocalWork(num_steps=3, batch_size=8, lr=0.05, momentum=0.9, weight_decay=1e-2)
PROFILE = TimingProfile("none", "toy", 8, (TensorTime("w", 1, 0.0, 0.0),), (BlockTime(0.0),))
CLIENT, OTHER = np.arange(16), np.arange(16, 40)


def images(side: int) -> Dataset:
    rng = np.random.default_rng(3)
    split = Split(rng.normal(size=(40, 1, side, side)).astype(np.float32), rng.integers(0, 10, 40))
    return Dataset("noise", "image", split, split, tuple("0123456789"), Plain())


def words() -> Dataset:
    tokens = np.random.default_rng(3).integers(0, 50, (40, 12))
    split = Split(tokens, tokens)
    return Dataset("noise", "text", split, split, tuple(map(str, range(50))), Plain())


CASES: dict[str, tuple[Callable[[], BlockModel], Callable[[], Dataset], list[tuple[int, int]]]] = {
    "norms": (partial(make_model, norm=True), make_data, [(1, 1), (1, 2), (2, 3), (1, 4)]),
    "vgg16": (
        partial(vgg16, width=0.125, batch_norm=True, in_channels=1),
        partial(images, 32),
        [(1, 3), (4, 9), (10, 14)],
    ),
    "resnet50": (
        partial(resnet50, num_classes=10, width=0.0625),
        partial(images, 16),
        [(1, 2), (5, 9), (17, 18)],
    ),
    "frozen": (partial(albert, "frozen", **SIZES), words, [(1, 1), (2, 3), (3, 4)]),
    "tied": (partial(albert, "frozen", tied=True, **SIZES), words, [(2, 3)]),
    "unshared": (partial(albert, "unshared", **SIZES), words, [(1, 2), (3, 3)]),
}


def bits(patches: Mapping[str, Patch]) -> dict[str, bytes]:
    return {name: patch.values.tobytes() for name, patch in patches.items()}


@pytest.mark.parametrize(
    ("name", "end", "front"), [(name, *window) for name, case in CASES.items() for window in case[2]]
)
def test_the_same_bits_as_with_the_whole_model(name: str, end: int, front: int) -> None:
    torch.manual_seed(7)
    make, make_samples, _ = CASES[name]
    model, data = make(), make_samples()
    spec, start, window = model.spec, model.tensors(), Window(end, front)
    exits = spec.exits_for(end, front)
    needed = spec.tensors_for(exits)
    selected = frozenset(t.name for t in spec.weights_in(end, front)[::2])
    train_spec = TrainSpec(WORK, 3, 11, selected, exits, end, hooks=(Pull(0.1),))
    client, other = (TorchTrainer(model, data, rows, PROFILE) for rows in (CLIENT, OTHER))
    importance = client.probe(start, window, WORK, 5)
    trained = client.train(start, train_spec)

    part = {tensor: values for tensor, values in start.items() if tensor in needed}
    assert front == spec.num_blocks or len(part) < len(start)
    everything = TrainSpec(
        WORK, 1, 3, frozenset(t.name for t in spec.weights), spec.exits_for(1, spec.num_blocks)
    )
    for _ in range(2):
        other.train({tensor: values + 1 for tensor, values in start.items()}, everything)
        assert importance == client.probe(part, window, WORK, 5)
        other.train({tensor: values + 1 for tensor, values in start.items()}, everything)
        again = client.train(part, train_spec)
        assert (trained.loss, trained.loss_square) == (again.loss, again.loss_square)
        assert bits(trained.patches) == bits(again.patches)
    assert np.isfinite(trained.loss)


def test_exits_on_the_way_train_the_same(normed: BlockModel, data: Dataset, profile: TimingProfile) -> None:
    """As DepthFL trains a prefix."""
    start, trainer = normed.tensors(), trainer_of(normed, data, profile)
    selected = frozenset(t.name for t in normed.spec.weights_in(1, 3))
    train_spec = TrainSpec(WORK, 3, 1, selected, (2, 3), hooks=(Distillation(0.5),))
    needed = normed.spec.tensors_for((2, 3))
    assert not {t.name for t in normed.spec.tensors if t.block == 4 or t.name.startswith("exits.one")} & needed
    part = {name: start[name] for name in needed}
    assert bits(trainer.train(start, train_spec).patches) == bits(trainer.train(part, train_spec).patches)


@pytest.mark.parametrize("width", [0.5, 1.0])
def test_a_whole_model_without_early_exits_trains_the_same(
    width: float, normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    start, trainer = normed.tensors(), trainer_of(normed, data, profile)
    train_spec = whole(normed, work, width=width, static_norm=width < 1)
    part = {name: start[name] for name in normed.spec.tensors_for((4,))}
    assert len(part) < len(start)
    assert bits(trainer.train(start, train_spec).patches) == bits(trainer.train(part, train_spec).patches)


def test_what_is_missing_is_named(normed: BlockModel, data: Dataset, profile: TimingProfile) -> None:
    start, trainer = normed.tensors(), trainer_of(normed, data, profile)
    statistics = "blocks.one.bn.running_mean"
    part = {name: start[name] for name in normed.spec.tensors_for((3,)) - {statistics}}
    with pytest.raises(ModelError, match=f"'{statistics}' .* is missing .* tensors_needed"):
        trainer.train(part, TrainSpec(WORK, 1, 1, frozenset(), (3,), end=2))
    with pytest.raises(ModelError, match=f"'{statistics}'"):
        trainer.probe(part, Window(2, 3), WORK, 1)


def test_nothing_of_an_earlier_training_stays(
    normed: BlockModel, data: Dataset, profile: TimingProfile
) -> None:
    start, trainer = normed.tensors(), trainer_of(normed, data, profile)
    needed = normed.spec.tensors_for((2,))
    trainer.train({name: start[name] for name in needed}, TrainSpec(WORK, 1, 1, frozenset(), (2,)))
    for name, values in normed.tensors().items():
        assert name in needed or np.isnan(values).all(), name


def test_a_test_needs_every_tensor(normed: BlockModel, data: Dataset, profile: TimingProfile) -> None:
    def score(model: dict[str, Array]) -> float:
        normed.load(model)
        return evaluate(normed, data.test_batches()).loss

    start, trainer = normed.tensors(), trainer_of(normed, data, profile)
    before = score(start)
    part = {name: start[name] for name in normed.spec.tensors_for((2,))}
    trainer.train(part, TrainSpec(WORK, 1, 1, frozenset(), (2,)))
    with pytest.raises(ModelError, match="is missing"):
        score(part)
    assert before == score(start)
