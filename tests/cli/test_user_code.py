"""``fedel`` in a folder whose packages and files have the names of ours or of our dependencies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fedel import plugins
from fedel.desk import child, user_code
from fedel.job import RunConfig

ROOT = Path(__file__).parents[2]
NAMES = ("cli", "services", "agents", "simulation", "experiments", "queue", "rich", "numpy")
SHORT = ("--json", "--set", "rounds.num_rounds=1", "--set", "workload.data_options.num_samples=200")
ALONE = (*SHORT, "--set", "rounds.min_clients=1", "--set", "fleet.slowdowns=[1]")
"""One agent: importing torch is what takes the time here."""
PATIENCE_SECONDS = 180.0


def packages(folder: Path) -> None:
    for name in NAMES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('a package of the user')\n")


def files(folder: Path) -> None:
    for name in NAMES:
        (folder / f"{name}.py").write_text("raise RuntimeError('a file of the user')\n")


@pytest.fixture(params=[packages, files], ids=["packages", "files"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make: Callable[[Path], None] = request.param
    make(tmp_path)
    for name in ("own.py", "own.toml"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    return tmp_path


def fedel(folder: Path, *words: str) -> str:
    """What the installed command prints."""
    done = subprocess.run(
        [Path(sys.executable).with_name("fedel"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def test_run(folder: Path) -> None:
    result = json.loads(fedel(folder, "run", "own.toml", *ALONE))
    assert ("finished", 1) == (result["phase"], result["rounds"])


def test_demo(folder: Path) -> None:
    result = json.loads(fedel(folder, "demo", "--job", "own.toml", *ALONE))
    assert 2 == len(result["runs"])


def test_simulate(folder: Path) -> None:
    job = (folder / "own.toml").read_text(encoding="utf-8")
    (folder / "fleet.toml").write_text(job.partition("[fleet]")[0] + "[partition]\nnum_clients = 3\n")
    result = json.loads(fedel(folder, "simulate", "fleet.toml", "--workers", "2", *SHORT))
    assert 1 == result["rounds"]


def test_code_beside_the_job(tmp_path: Path) -> None:
    """``fedel run examples/own.toml`` from the root of the repository, as the README prints it."""
    out = str(tmp_path / "runs")
    result = json.loads(fedel(ROOT, "run", "examples/own.toml", "--out", out, *ALONE))
    assert 1 == result["rounds"]


PATH = "import json, sys; print(json.dumps(sys.path))"


def test_a_child_searches_installed_code_first(tmp_path: Path) -> None:
    (tmp_path / "path_of_child.py").write_text(PATH)
    (tmp_path / "beside").mkdir()
    command = child.command("path_of_child", user_code=[str(tmp_path / "beside")])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert [str(tmp_path), str(tmp_path / "beside")] == found[-2:]
    assert not {"", str(tmp_path)} & set(found[:-2])
    assert any("site-packages" in entry for entry in found[:-2]), os.environ.get("PYTHONPATH")


def test_packages_that_a_job_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that the author of the job starts may run them, wherever they are installed."""
    point = EntryPoint("registered", "brought.methods:Mine", "fedel.strategies")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    job = RunConfig.parse(
        {
            "workload": {"model": "mine.nets.small:make", "data": "fedel.experiments.tiny:images"},
            "strategy": {"name": "fedprox", "base": {"name": "registered"}},
        }
    )
    assert ["brought", "fedel.experiments.tiny", "fedel.training.factory", "mine"] == user_code.packages(job)
    evil = RunConfig.parse({"workload": {"model": "subprocess:run", "data": "os:system"}})
    assert ["fedel.training.factory"] == user_code.packages(evil)
