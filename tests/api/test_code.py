"""``fedel.run`` with code that travels: which files it takes, and that devices run them with torch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig

import fedel
from fedel.api import jobs
from fedel.api.code import packed
from fedel.errors import ConfigError
from fedel.plugins import Allowed
from fedel.security.tls import Tls
from tests.agents.stand_ins import running
from tests.security.support import Pki, servers
from tests.services.coordinator.support import asynchronous

OWN = """
import numpy as np
from torch import nn
from helpers import CLASSES

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, width)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x):
        from helpers import squash
        return self.last(squash(self.second(squash(self.first(x)))))

def net(width=8):
    return Net(width)

def data():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 6)).astype(np.float32), np.arange(40) % CLASSES
    return x[:32], y[:32], x[32:], y[32:]
"""
HELPERS = """
import torch
CLASSES = 3

def squash(x):
    return torch.relu(x)
"""
JOB = """
[workload]
model = "own:net"
data = "own:data"
input = [6]
classes = 3

[strategy]
name = "fedavg"

[rounds]
num_rounds = 1

[work]
num_steps = 2
batch_size = 4

[code]
files = ["own.py", "helpers.py"]
"""


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    folder = tmp_path / "desk"
    folder.mkdir()
    for name, text in (("own.py", OWN), ("helpers.py", HELPERS), ("job.toml", JOB)):
        (folder / name).write_text(text)
    return folder


@asynchronous
async def test_a_job_with_its_code_runs_on_a_device_that_has_nothing(tmp_path: Path, desk: Path) -> None:
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "ada")
    async with servers(tmp_path, pki) as made:
        tls, code = Tls(dir=pki.tls("agent", "jetson").dir), Allowed(bundles=("operator:ada",))
        config = AgentConfig(
            made.coordinator_address, "jetson", tmp_path / "state", threads=1, tls=tls, code=code
        )
        async with running(Agent(config)):
            result = await asyncio.to_thread(
                fedel.run,
                desk / "job.toml",
                out=tmp_path / "runs",
                name="night",
                coordinator=made.coordinator_address,
                certs=operator.dir,
                progress=False,
            )
    assert "finished" == result.result.phase
    assert 1 == result.result.rounds
    assert packed(jobs.read(desk / "job.toml"), ()).sha256 == result.stored.settings["bundle"]  # type: ignore[union-attr]
    # The table of that run says its hash; the code itself has to be named again.
    with pytest.raises(ConfigError, match=r"came with code \([0-9a-f]{12}\).*name it again with --code"):
        fedel.run(tmp_path / "runs" / "night" / "config.toml", coordinator="127.0.0.1:1", out=tmp_path / "runs")


def names(job: Path, *code: str | Path) -> list[str]:
    found = packed(jobs.read(job), code)
    return sorted(found.files) if found else []


def test_files_modules_and_folders(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = desk / "job.toml"
    assert ["helpers.py", "own.py"] == names(job)
    job.write_text(JOB.partition("[code]")[0])
    assert [] == names(job)
    assert ["helpers.py", "own.py"] == names(job, desk) == names(job, "own", "helpers")
    monkeypatch.chdir(desk)
    assert ["helpers.py", "own.py"] == names(job, "own.py", "helpers")
    with pytest.raises(ConfigError, match="--code nothing: there is no such file, folder or module here"):
        names(job, "nothing")
    job.write_text(JOB.replace("helpers.py", "helper.py"))
    with pytest.raises(
        ConfigError, match=r"\[code\] files: there is no .*helper\.py; paths begin at the job's"
    ):
        names(job)


def test_a_module_that_was_forgotten_is_missed_at_the_desk(desk: Path) -> None:
    job = desk / "job.toml"
    job.write_text(JOB.replace(', "helpers.py"', ""))
    with pytest.raises(ConfigError, match=r"own\.py of the job's code imports 'helpers', which is in .*desk"):
        names(job)
    (desk / "own.py").write_text("def broken(:\n")
    with pytest.raises(ConfigError, match=r"own\.py of the job's code is not Python"):
        names(job)


def test_on_this_machine_nothing_changes(desk: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--code goes with --coordinator"):
        fedel.run(desk / "job.toml", code=["own.py"])
    job = jobs.read(desk / "job.toml")
    assert "code" not in job.table
    assert "own:net" == job.simulation().run.workload.model
