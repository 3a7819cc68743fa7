"""A model and a data set as a user would write them: nothing of FedEL in here."""

import numpy as np
from torch import nn


def model() -> nn.Sequential:
    """Five layers with weights, so five blocks; what has none joins the block before it."""
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
    """Images with a bright bar in one of four places; x, y to train on, then x, y to test on."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, num_samples)
    x = rng.normal(0, 1, (num_samples, 1, 16, 16)).astype(np.float32)
    for place in range(4):
        x[y == place, :, 4 * place : 4 * place + 3] += 1.0
    cut = num_samples * 4 // 5
    return x[:cut], y[:cut], x[cut:], y[cut:]
