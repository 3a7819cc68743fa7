"""A small learnable problem and a network with batch norm for it, as a user would bring them."""

from __future__ import annotations

import numpy as np
from torch import nn

from fedel.types import Array, BlockTime, ModelSpec, TensorTime, TimingProfile

NUM_CLASSES = 3


def data(num_train: int = 240, num_test: int = 61) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(5)
    patterns = rng.normal(size=(NUM_CLASSES, 1, 6, 6))
    y = rng.integers(0, NUM_CLASSES, num_train + num_test)
    x = (patterns[y] + rng.normal(scale=0.7, size=(len(y), 1, 6, 6))).astype(np.float32)
    return x[:num_train], y[:num_train], x[num_train:], y[num_train:]


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(54, NUM_CLASSES)),
    )


def profile(spec: ModelSpec) -> TimingProfile:
    times = (TensorTime(t.name, t.block, 1e-3 * len(t.shape), 1e-5 * t.size + 1e-4) for t in spec.weights)
    blocks = (BlockTime(1e-3, 1e-4, 2e-4) for _ in spec.block_names)
    return TimingProfile("tiny", spec.name, 8, tuple(times), tuple(blocks), overhead_seconds=1e-4)
