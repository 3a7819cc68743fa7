"""A job of seconds, and a model and data for it that lie in no module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fedel.simulation.job import SimulationConfig
from fedel.training.factory import initial_model
from fedel.training.profile_io import save_profile
from tests.simulation import tiny

WORKLOAD = {"model": "tests.simulation.tiny:model", "data": "tests.simulation.tiny:data"}
ROUNDS = 3


def job_in(folder: Path) -> dict[str, Any]:
    """Without a workload."""
    job = {
        "seed": 1,
        "rounds": {"num_rounds": ROUNDS, "num_participants": 3},
        "work": {"num_steps": 3, "batch_size": 8},
        "partition": {"num_clients": 4, "method": "iid"},
        "fleet": {"base": str(folder / "base.json")},
    }
    spec = initial_model(SimulationConfig.parse({**job, "workload": WORKLOAD}).run)[0]
    save_profile(tiny.profile(spec), folder / "base.json")
    return job


def net(width: int = 6) -> Callable[[], nn.Module]:
    """A function that no other process can import."""

    def make_net() -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(4, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(9 * width, tiny.NUM_CLASSES)),
        )

    return make_net
