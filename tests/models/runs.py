"""Small finished runs, and the models and data of them, as a user would write them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedel.simulation import start
from fedel.simulation.job import SimulationConfig
from fedel.types import Array

HERE = "tests.models.runs"
EXAMPLES = Path(__file__).parents[2] / "examples"


def simulated(path: Path, model: str, data: str, num_rounds: int = 2, **tables: Any) -> Path:
    """The directory of a finished run."""
    table = {
        "seed": 3,
        "workload": {"model": model, "data": data},
        "rounds": {"num_rounds": num_rounds},
        "work": {"num_steps": 3, "batch_size": 16, "lr": 0.05},
        "partition": {"num_clients": 2, "method": "iid"},
        "fleet": {"base": "flops"},
    }
    job = SimulationConfig.parse(table | tables)
    with start.session(job, path, executor="serial") as session:
        start.play_all(session, lambda _: None)
    return path


class Residual(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(size, size, 3, padding=1)
        self.norm = nn.BatchNorm2d(size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).relu()


class Net(nn.Module):
    """With statistics, and a layer that is in no block."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.entry = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.ModuleList(Residual(4) for _ in range(2))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.classifier = nn.Linear(16, num_classes)
        self.unused = nn.Linear(2, 2)

    def blocks(self) -> dict[str, nn.Module]:
        first, second = self.body
        inner = {"entry": self.entry, "first": first, "second": second}
        return {**inner, "pool": self.pool, "classifier": self.classifier}

    def forward(self, x: Tensor) -> Tensor:
        for block in Net.blocks(self).values():
            x = block(x)
        return x


class Copied(Net):
    """Its blocks are copies, so what is trained is not in it."""

    def blocks(self) -> dict[str, nn.Module]:
        return copy.deepcopy(super().blocks())


def pictures(num_samples: int = 160) -> tuple[Array, Array, Array, Array]:
    """Bytes, darker in one class than in the next."""
    rng = np.random.default_rng(4)
    y = rng.integers(0, 3, num_samples)
    x = (rng.integers(0, 100, (num_samples, 3, 9, 9)) + 70 * y[:, None, None, None]).astype(np.uint8)
    cut = num_samples * 3 // 4
    return x[:cut], y[:cut], x[cut:], y[cut:]
