"""A small real problem: a network of four blocks, and images whose class is the quarter that is bright."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedel.data.dataset import Dataset, Split
from fedel.data.transforms import Images
from fedel.models.blocks import BlockModel
from fedel.seeds import generator
from fedel.training.batches import batch_stream
from fedel.training.trainer import TorchTrainer
from fedel.types import LocalWork, Tensors, TimingProfile, TrainSpec

NUM_CLASSES = 4
INDICES = np.arange(64)
"""The samples of the one client in these tests."""


def conv_block(inputs: int, outputs: int, norm: bool) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=nn.Conv2d(inputs, outputs, 3, padding=1))
    if norm:
        layers["bn"] = nn.BatchNorm2d(outputs)
    layers["relu"] = nn.ReLU(inplace=True)
    return nn.Sequential(layers)


def head(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, NUM_CLASSES))


def make_model(norm: bool = False) -> BlockModel:
    torch.manual_seed(7)
    blocks = {
        "one": conv_block(1, 4, norm),
        "two": conv_block(4, 6, norm),
        "three": conv_block(6, 8, norm),
        "classifier": head(8),
    }
    exits = {"one": head(4), "two": head(6), "three": head(8)}
    example = torch.zeros(1, 1, 8, 8)
    return BlockModel("toy", blocks, exits, num_classes=NUM_CLASSES, stages=(2, 4), example=example)


def make_data(num_samples: int = 96) -> Dataset:
    rng = np.random.default_rng(3)
    y = rng.integers(0, NUM_CLASSES, num_samples)
    x = rng.integers(0, 120, (num_samples, 1, 8, 8)).astype(np.uint8)
    for image, label in zip(x, y, strict=True):
        row, column = divmod(int(label), 2)
        image[0, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] += 100
    split = Split(x, y)
    return Dataset("quarters", "image", split, split, ("nw", "ne", "sw", "se"), Images(mean=(0.3,), std=(0.2,)))


def trainer_of(model: BlockModel, data: Dataset, profile: TimingProfile) -> TorchTrainer:
    return TorchTrainer(model, data, INDICES, profile)


def whole(model: BlockModel, work: LocalWork, **options: object) -> TrainSpec:
    names = frozenset(t.name for t in model.spec.weights)
    train_spec = TrainSpec(
        work, num_steps=work.num_steps, seed=11, selected=names, exits=(model.spec.num_blocks,)
    )
    return replace(train_spec, **options)  # type: ignore[arg-type]


def batches_of(data: Dataset, train_spec: TrainSpec) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = generator(train_spec.seed, "batches")
    stream = batch_stream(INDICES, train_spec.work, rng)
    pairs = [data.train_batch(next(stream), rng) for _ in range(train_spec.num_steps)]
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pairs]


def assert_close(expected: Tensors, actual: Tensors, tolerance: float = 1e-6) -> None:
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], atol=tolerance, rtol=1e-5, err_msg=name)
