"""A model and a data set as a user would write them, without any import from FedEL."""

import numpy as np
from torch import nn


def model() -> nn.Sequential:
    """Five layers with weights, so five blocks; layers without weights join the block before them."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
    )


def data(num_samples: int = 2000):
    """Noisy stripes in one of four directions; returns x and y for training, then x and y for testing."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, num_samples)
    row, column = np.mgrid[0:16, 0:16]
    angle = (y * np.pi / 4)[:, None, None]
    stripes = np.sin(row * np.sin(angle) + column * np.cos(angle))
    x = (stripes[:, None] + rng.normal(0, 0.5, (num_samples, 1, 16, 16))).astype(np.float32)
    cut = num_samples * 4 // 5
    return x[:cut], y[:cut], x[cut:], y[cut:]
