"""A model, data and a training loop in plain PyTorch: what a simulation's client-steps are compared with.

Nothing of FedEL is imported here: the script for Flower runs in an environment without it.
"""

import numpy as np
import torch
from torch import nn

NUM_STEPS, BATCH_SIZE, LR, MOMENTUM = 20, 32, 0.02, 0.9


def model() -> nn.Sequential:
    """A small convolutional network for images of 28 x 28."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 9, 128), nn.ReLU(), nn.Linear(128, 10))


def data(num_samples: int = 10_000):  # type: ignore[no-untyped-def]  # as a user would write it
    """Noise with ten classes: images and labels for training, then for testing."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(num_samples, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, num_samples)
    return x, y, x[:100], y[:100]


def train(network: nn.Module, x: torch.Tensor, y: torch.Tensor, seed: int, num_steps: int = NUM_STEPS) -> float:
    """One client's round; its last loss."""
    rng, loss_of = np.random.default_rng(seed), nn.CrossEntropyLoss()
    optimiser = torch.optim.SGD(network.parameters(), LR, MOMENTUM)
    network.train()
    loss = torch.zeros(())
    for _ in range(num_steps):
        rows = torch.from_numpy(rng.integers(0, len(x), BATCH_SIZE))
        optimiser.zero_grad()
        loss = loss_of(network(x[rows]), y[rows])
        loss.backward()
        optimiser.step()
    return float(loss.detach())
