"""``fedel run`` and ``fedel demo`` as a user starts them: the user's own model, and Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from fedel.models import deploy

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.05


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A user's directory with a copy of the example."""
    for name in ("own.py", "own.toml"):
        shutil.copy(REPOSITORY / "examples" / name, tmp_path)
    return tmp_path


@contextmanager
def fedel(
    directory: Path, *words: str, start: tuple[str, str] = ("-m", "fedel.cli.main")
) -> Iterator[subprocess.Popen[str]]:
    """The running command; killed at the end if it has not ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *start, *words],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as a shell does: signals go to this command, not to the test run
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], bool], process: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert process.poll() is None, f"it ended too early, waiting until {what}: {process.communicate()}"
        assert time.monotonic() < deadline, f"timeout, waiting until {what}"
        time.sleep(_LOOK_SECONDS)


def processes_of(directory: Path) -> list[str]:
    """Command lines of the servers and agents of runs in the directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it ended in the meantime
        if any(word.startswith(str(directory)) and word.endswith(".toml") for word in words):
            found.append(" ".join(words))
    return found


@pytest.mark.slow
def test_ctrl_c_during_the_start(directory: Path) -> None:
    runs = directory / "runs"
    with fedel(directory, "run", "own.toml", "--out", str(runs), "--name", "cut") as process:
        until(lambda: len(processes_of(directory)) == 5, process, "two servers and three agents are there")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert (130, []) == (process.returncode, processes_of(directory))
    assert "Traceback" not in said


# A command that is interrupted at the moment at which its third process starts.
INTERRUPTED = """
import itertools, os, signal, subprocess, sys
from fedel.cli import main
from fedel.desk import local
starts = itertools.count(1)

class Started(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        if next(starts) == 3:
            os.kill(os.getpid(), signal.SIGINT)

local.subprocess.Popen = Started
sys.exit(main.main())
"""


def test_ctrl_c_between_two_processes(directory: Path) -> None:
    with fedel(
        directory, "run", "own.toml", "--out", str(directory / "runs"), start=("-c", INTERRUPTED)
    ) as process:
        process.communicate(timeout=PATIENCE_SECONDS)
    assert (130, []) == (process.returncode, processes_of(directory))


@pytest.mark.slow
@pytest.mark.parametrize("words", [("run", "own.toml"), ("demo", "--job", "own.toml")], ids=["run", "demo"])
def test_ctrl_c_in_a_round(directory: Path, words: tuple[str, ...]) -> None:
    runs = directory / "runs"
    forever = ("--set", "rounds.num_rounds=100000", "--out", str(runs))
    with fedel(directory, *words, *forever) as process:
        until(lambda: any(runs.glob("*/rounds.jsonl")), process, "the first round is closed")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert (130, []) == (process.returncode, processes_of(directory))
    assert "Traceback" not in said


@pytest.mark.slow
def test_kill_ends_the_federation(directory: Path) -> None:
    runs = directory / "runs"
    with fedel(directory, "run", "own.toml", "--out", str(runs), "--name", "cut") as process:
        until(lambda: len(processes_of(directory)) == 5, process, "two servers and three agents are there")
        process.kill()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    assert [] == processes_of(directory)


@pytest.mark.slow
def test_own_model_and_data(directory: Path) -> None:
    with fedel(directory, "run", "own.toml", "--json", "--name", "first") as process:
        said, complaints = process.communicate(timeout=300)
    assert 0 == process.returncode, complaints
    result = json.loads(said)
    assert ("finished", 12) == (result["phase"], result["rounds"])
    assert result["best_accuracy"] > 0.6  # four classes: chance is 0.25
    run = directory / "runs" / "first"
    left = {path.name for path in run.iterdir()}
    assert {"config.toml", "result.json", "rounds.jsonl", "model.safetensors", "report.html"} <= left
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [3] * 12 == [record["num_updates"] for record in records]
    *_, x, y = runpy.run_path(str(directory / "own.py"))["data"]()
    best = deploy.load(run, model=runpy.run_path(str(directory / "own.py"))["model"])
    correct = best.module()(torch.from_numpy(x)).argmax(1).numpy() == y
    assert (result["best_round"] + 1, result["best_accuracy"]) == (best.round, pytest.approx(correct.mean()))
    weights = {name for name in load_file(run / "model.safetensors") if name.startswith("blocks.")}
    assert weights == set(result["tensors"])
    assert [] == processes_of(directory)
