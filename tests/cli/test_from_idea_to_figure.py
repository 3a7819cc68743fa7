"""A researcher's afternoon from an empty directory: own model, data, method; comparison; figure; export."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import fedel

MINE = '''
import numpy as np
from dataclasses import dataclass
from typing import ClassVar
from torch import nn
from torch.nn import functional as F

from fedel.strategies import FedEL


class Net(nn.Module):
    """Lists no blocks: FedEL finds them in forward."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 6, 3, padding=1)
        self.deeper = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.max_pool2d(F.relu(self.deep(x)), 2)
        x = x + F.relu(self.deeper(x))
        return self.head(x.mean((2, 3)))


def data():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    x = (40 * y[:, None, None, None] + rng.integers(0, 60, (240, 8, 8, 1))).astype(np.uint8)
    return {"x_train": x[:180], "y_train": y[:180], "x_test": x[180:], "y_test": y[180:]}


@dataclass(frozen=True)
class Mine(FedEL):
    name: ClassVar[str] = "mine"
    beta: float = 1.0
'''
JOB = """
seed = 1
scope = "train"
[workload]
model = "mine:Net"
data = "mine:data"
[rounds]
num_rounds = 4
[work]
num_steps = 6
batch_size = 8
lr = 0.05
[partition]
method = "iid"
[fleet]
base = "flops"
[fleet.counts]
orin = 2
"orin/2" = 2
"""


def command(folder: Path, *words: str) -> str:
    program = [sys.executable, "-m", "fedel.cli.main", *words]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_an_idea_to_a_figure_and_a_model_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
    compared = command(
        tmp_path,
        *("compare", "job.toml", "--methods", "fedel,fedavg,mine:Mine", "--seeds", "3", "--out", "out"),
        *("--executor", "serial", "--csv", "--figures", "--format", "pdf,png", "--json"),
    )
    figures = json.loads(compared)
    assert ["fedel", "fedavg", "mine:Mine"] == [each["strategy"] for each in figures["methods"]]
    assert all([1, 2, 3] == each["seeds"] and each["same_time"]["half"] > 0 for each in figures["methods"])
    tables = list((tmp_path / "out" / "csv").glob("*.csv"))
    assert 9 == len(tables)
    rounds = [list(csv.DictReader(file.read_text(encoding="utf-8").splitlines())) for file in tables]
    assert all(len(rows) >= 4 and rows[-1]["accuracy"] for rows in rounds)
    for kind in ("pdf", "png"):
        assert list((tmp_path / "out" / "figures").glob(f"*.{kind}")), kind

    run = f"out/runs/{figures['runs']['FedEL'][0]['run']}"
    command(tmp_path, "export", run, "--exit", "3", "--format", "onnx", "--out", "three.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    images = np.random.default_rng(1).integers(0, 256, (5, 1, 8, 8)).astype(np.float32)
    session = onnxruntime.InferenceSession("three.onnx")
    (answer,) = session.run(None, {session.get_inputs()[0].name: images})
    stored = json.loads((tmp_path / run / "input.json").read_text(encoding="utf-8"))["normalisation"]
    mean, std = (torch.tensor(stored[key]).reshape(1, -1, 1, 1) for key in ("mean", "std"))
    smaller = fedel.load(run).model(exit=3, round="best")
    expected = smaller((torch.from_numpy(images) / stored["scale"] - mean) / std).numpy()
    assert (5, 3) == answer.shape
    np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5)
