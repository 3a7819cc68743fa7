"""A run is fetched and its model exported on a machine that did not start it and has no data."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig
from rich.console import Console

from fedel.api.federation import first_model, one_run
from fedel.cli.main import main
from fedel.data.model_input import FILE, ModelInput
from fedel.job import RunConfig
from fedel.plugins import Allowed
from fedel.training.profile_io import save_profile
from fedel.v1 import coordinator_pb2 as pb
from tests.agents.stand_ins import running
from tests.federation.support import servers
from tests.services.coordinator.support import asynchronous
from tests.simulation import tiny

HERE = "tests.cli.test_fetch_and_export"
JOB = RunConfig.parse(
    {
        "workload": {"model": "cnn", "model_options": {"width": 0.25}, "data": f"{HERE}:images"},
        "strategy": {"name": "fedavg"},
        "rounds": {"num_rounds": 1},
        "work": {"num_steps": 2, "batch_size": 4},
    }
)


def images() -> tuple[np.ndarray, ...]:
    """Bytes, which FedEL normalises with numbers of the data's own."""
    rng = np.random.default_rng(7)
    x, y = rng.integers(0, 200, (40, 1, 8, 8), np.uint8), np.arange(40) % 4
    return x[:32], y[:32], x[32:], y[32:]


def _no_data() -> tuple[np.ndarray, ...]:
    raise AssertionError("there is no data on this machine")


@asynchronous
async def test_what_the_model_takes_comes_with_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with servers(tmp_path) as made:
        save_profile(tiny.profile(first_model(JOB)[1]), tmp_path / "profile.json")
        words = made.address, "client-0", tmp_path / "state"
        profile, allowed = str(tmp_path / "profile.json"), Allowed((HERE,))
        agent = Agent(AgentConfig(*words, threads=1, profile=profile, code=allowed))
        async with running(agent):
            desk = tmp_path / "desk" / "night"
            status = await one_run(made.address, "night", JOB, desk, Console(quiet=True))
        assert pb.RUN_PHASE_FINISHED == status.phase, status.message
        monkeypatch.setattr(f"{HERE}.images", _no_data)
        place = tmp_path / "elsewhere"
        fetch = ["runs", "fetch", "night", "--coordinator", made.address, "--out", str(place)]
        assert 0 == await asyncio.to_thread(main, fetch), capsys.readouterr()
        fetched = (place / "night" / FILE).read_bytes()
        assert (desk / FILE).read_bytes() == fetched
        # A folder that an older version fetched has all but this file.
        (place / "night" / FILE).unlink()
        assert 0 == await asyncio.to_thread(main, fetch), capsys.readouterr()
        assert fetched == (place / "night" / FILE).read_bytes()
    capsys.readouterr()
    assert 0 == main(["export", str(place / "night"), "--json"])
    told = json.loads(capsys.readouterr().out)
    taken = ModelInput.load(desk)
    assert taken is not None
    assert taken.normalisation is not None
    assert list(taken.normalisation.mean) == pytest.approx(json.loads(told["mean"]))
