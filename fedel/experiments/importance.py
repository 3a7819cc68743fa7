"""The importance of each tensor of a run's final model, measured by each client (paper, section 3)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from fedel.core.importance import local
from fedel.data.partition import split
from fedel.errors import ConfigError
from fedel.experiments.plans import PlannedRun
from fedel.files import write_atomic
from fedel.seeds import derive
from fedel.simulation.children import Child
from fedel.simulation.devices import names
from fedel.simulation.job import SimulationConfig
from fedel.training.factory import fresh_model, make_data
from fedel.training.profile_io import load_profile
from fedel.training.trainer import TorchTrainer
from fedel.types import Window

NUM_CLIENTS = 10
Importance = Mapping[str, float]


@dataclass(frozen=True)
class Probed:
    clients: Mapping[str, Importance]
    """Per client, per tensor in forward order."""
    together: Importance
    """On the data of all clients."""

    @property
    def between_clients(self) -> float:
        """Mean rank correlation over pairs of clients."""
        return statistics.fmean(correlation(a, b) for a, b in combinations(self.clients.values(), 2))

    @property
    def with_together(self) -> float:
        return statistics.fmean(correlation(a, self.together) for a in self.clients.values())


def correlation(a: Importance, b: Importance) -> float:
    """Spearman's.

    >>> correlation({"x": 1.0, "y": 2.0, "z": 9.0}, {"x": 0.1, "y": 0.2, "z": 0.3})
    1.0
    """
    mine, theirs = (np.argsort(np.argsort([values[name] for name in a])) for values in (a, b))
    return round(float(np.corrcoef(mine, theirs)[0, 1]), 12)


def measured(run: PlannedRun, folder: Path) -> Probed:
    """Measured once, and stored next to the run."""
    kept = folder / "importance.json"
    if not kept.exists():
        if not (folder / "model.safetensors").exists():
            raise ConfigError(
                f"{folder}: the model of this run is not here, only its records; remove the folder, and the"
                " experiment does the run again"
            )
        # In a separate process: after torch has computed gradients here, workers could not be forked any more.
        child = Child(lambda _: _probe(run, folder))
        try:
            child.send(None)
            write_atomic(kept, json.dumps(asdict(child.receive())))
        finally:
            child.end()
    return Probed(**json.loads(kept.read_text(encoding="utf-8")))


def _probe(run: PlannedRun, folder: Path) -> Probed:
    job = SimulationConfig.parse(run.table, run.name)
    data = make_data(job.run)
    model = fresh_model(job.run, data)
    profile = load_profile(folder / "profile.json", model.spec)
    tensors = load_file(folder / "model.safetensors")
    parts = split(data, job.partition, run.seed)
    holders = dict(list(zip(names(len(parts)), parts, strict=True))[:NUM_CLIENTS])
    holders["together"] = np.arange(len(data.train))
    window = Window(1, model.spec.num_blocks)
    found = {
        name: local(
            TorchTrainer(model, data, rows, profile).probe(
                tensors, window, job.run.work, derive(run.seed, name)
            )
        )
        for name, rows in holders.items()
    }
    together = found.pop("together")
    return Probed(found, together)
