"""The example of a user's own method, in a user's directory: simulated, and over gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from fedel.job import RunConfig
from fedel.simulation.job import SimulationConfig
from fedel.training.factory import initial_model
from fedel.training.profile_io import save_profile
from fedel.types import Tensors
from tests.federation.support import agents, create_run, job_of, model_of, servers, watching
from tests.federation.trainers import clients_of
from tests.simulation import tiny
from tests.simulation.fakes import play
from tests.simulation.test_cli_simulate import TABLE, fedel_simulate
from tests.strategies.fakes import same_bits

REPOSITORY = Path(__file__).parents[2]
NUM_CLIENTS = 4
METHOD = "own_method:ServerMomentum"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory outside the project, with only the example from it."""
    for name in ("own_method.py", "own_method.toml"):
        shutil.copy(REPOSITORY / "examples" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "own_method", raising=False)
    return tmp_path


def simulated(directory: Path, name: str, *settings: str) -> Tensors:
    """The model that ``fedel simulate own_method.toml`` gives on a small problem, by torch."""
    save_profile(tiny.profile(initial_model(SimulationConfig.parse(TABLE).run)[0]), directory / "base.json")
    small = ["rounds.num_rounds=2", "work.num_steps=3", "partition.num_clients=3", "fleet.base=base.json"]
    workload = [f"workload.{key}={value}" for key, value in TABLE["workload"].items()]
    words = [word for setting in (*small, *workload, *settings) for word in ("--set", setting)]
    assert fedel_simulate("own_method.toml", "--name", name, "--executor", "serial", *words) == 0
    return load_file(directory / "runs" / name / "model.safetensors")


def test_simulation(directory: Path) -> None:
    models = {
        "both": simulated(directory, "both"),
        "loss": simulated(directory, "loss", "strategy.momentum=0.0"),
        "fold": simulated(directory, "fold", "strategy.smoothing=0.0"),
    }
    neither = simulated(directory, "neither", "strategy.smoothing=0.0", "strategy.momentum=0.0")
    assert len({b"".join(v.tobytes() for v in m.values()) for m in (*models.values(), neither)}) == 4
    result = json.loads((directory / "runs" / "both" / "result.json").read_text())
    assert (result["strategy"], result["rounds"]) == ("server-momentum", 2)


def federated(job: RunConfig, folder: Path, num_aggregators: int) -> Tensors:
    async def scenario() -> Tensors:
        async with servers(folder, num_aggregators) as made:
            await create_run(made.address, "own", job)
            async with (
                agents(folder, made.address, range(NUM_CLIENTS), NUM_CLIENTS),
                watching(made.address, "own") as watch,
            ):
                await watch.finished()
                return await model_of(made.address, "own", folder)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "strategy",
    [{"name": METHOD, "momentum": 0.9}, {"name": "fedprox", "mu": 0.2, "base": {"name": METHOD}}],
    ids=["own", "fedprox around it"],
)
def test_over_grpc_as_in_a_simulation(directory: Path, strategy: dict[str, Any]) -> None:
    job = job_of(strategy, NUM_CLIENTS)
    over_grpc = federated(job, directory, num_aggregators=2)
    assert same_bits(dict(play(job, clients_of(NUM_CLIENTS)).model), over_grpc)
    plain = job_of({"name": "fedavg"}, NUM_CLIENTS)
    assert not same_bits(dict(play(plain, clients_of(NUM_CLIENTS)).model), over_grpc)


@pytest.mark.slow
def test_fedel_run(directory: Path) -> None:
    """Coordinator, aggregator and agents as processes, with torch on the devices."""
    words = ["run", "own_method.toml", "--name", "own", "--set", "rounds.num_rounds=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "fedel.cli.main", *words],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((directory / "runs" / "own" / "result.json").read_text())["strategy"] == "server-momentum"
