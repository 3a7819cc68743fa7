"""Runs of a comparison in processes side by side: the same as one at a time, also after Ctrl-C and a crash."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedel
from fedel import config
from fedel.errors import ConfigError, FedelError, ServiceError
from fedel.records import RunResult
from tests.api.support import ROUNDS, WORKLOAD, job_in, net
from tests.simulation import tiny

METHODS = ["fedel", "fedavg"]
PATIENCE_SECONDS = 120.0


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return job_in(tmp_path)


def outcomes(place: Path) -> dict[str, Any]:
    """Of every run: its result without the time that it took here, and its model."""
    found = {}
    for folder in sorted((place / "runs").iterdir()):
        result = RunResult.from_json((folder / "result.json").read_text())
        found[folder.name] = replace(result, wall_seconds=0.0), (folder / "model.safetensors").read_bytes()
    return found


def test_side_by_side_and_one_at_a_time_give_the_same_bits(
    job: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """With objects that no other process can import, and with workers of their own."""
    objects = {"model": net(), "data": tiny.data()}
    one = fedel.compare(job, METHODS, 2, out="one", executor="serial", progress=False, **objects)
    heard: list[Any] = []
    two = fedel.compare(job, METHODS, 2, out="two", jobs=2, workers=2, progress=heard.append, **objects)
    three = fedel.compare(job, METHODS, 2, out="three", jobs=3, **objects)
    assert one.methods == two.methods == three.methods
    assert outcomes(one.path) == outcomes(two.path) == outcomes(three.path)
    assert 4 * ROUNDS == len(heard)
    lines = capfd.readouterr().err.splitlines()
    places = [place for line in lines if (place := re.match(r"\[(\d)/4\] ", line))]
    assert {1, 2, 3, 4} == {int(place[1]) for place in places}, lines
    assert 4 == len([line for line in lines if line.endswith("begins")])
    assert 4 == len([line for line in lines if "after 3 rounds" in line])
    assert 0 == len(fedel.compare(job, METHODS, 2, out="two", jobs=2, progress=heard.append, **objects).failed)
    assert 4 * ROUNDS == len(heard)


def test_runs_go_on_after_ctrl_c(job: dict[str, Any], tmp_path: Path) -> None:
    """A real process with a real signal to the whole group, as a terminal sends it."""
    long = {**job, "workload": WORKLOAD, "rounds": {**job["rounds"], "num_rounds": 40}}
    (tmp_path / "long.toml").write_text(config.write(long))
    words = ["compare", "long.toml", "--methods", ",".join(METHODS), "--seeds", "1", "--jobs", "2"]
    command = [sys.executable, "-m", "fedel.cli.main", *words]
    begun = set[str]()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        while len(begun) < 2 and (line := process.stderr.readline()):
            begun |= set(re.findall(r"^\[\d/2\] (\S+)  round +[2-9]/40", line))
        os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read()
        assert 130 == process.wait(PATIENCE_SECONDS)
    assert "0 of 2 runs in runs/compare-long are done: continue with the same call" in said
    assert "Traceback" not in said
    kept = {
        file.parent.name: len(file.read_text().splitlines()) for file in Path("runs").glob("**/rounds.jsonl")
    }
    assert 2 == len(kept)
    assert all(2 <= number < 40 for number in kept.values())
    again = fedel.compare("long.toml", METHODS, 1, jobs=2, progress=False)
    whole = fedel.compare("long.toml", METHODS, 1, out="whole", executor="serial", progress=False)
    assert outcomes(whole.path) == outcomes(again.path)


def test_a_run_whose_process_dies_has_failed_and_the_others_are_done(job: dict[str, Any]) -> None:
    parent = os.getpid()

    def deadly() -> Any:
        if os.getpid() != parent and not Path("survives").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return tiny.data()

    whole = {**job, "workload": WORKLOAD}
    with pytest.raises(ServiceError, match=r"exit code -9.*use fewer --jobs"):
        fedel.compare(whole, METHODS, 1, data=deadly, jobs=2, out="dead", progress=False)
    Path("survives").touch()
    found = fedel.compare(whole, METHODS, 1, data=deadly, jobs=2, out="dead", progress=False)
    assert {} == found.failed


def test_an_error_in_the_users_code_is_shown(job: dict[str, Any]) -> None:
    def broken() -> Any:
        raise RuntimeError("no such sensor")

    with pytest.raises(FedelError, match="no such sensor"):
        fedel.compare({**job, "workload": WORKLOAD}, METHODS, 1, data=broken, jobs=2, progress=False)


def test_a_profile_is_measured_before_others_begin(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDEL_PROFILES", str(tmp_path / "profiles"))
    measured = {**job, "workload": WORKLOAD, "fleet": {"base": "measured"}}
    fedel.compare(measured, METHODS, 1, jobs=2)
    lines = capfd.readouterr().err.splitlines()
    assert 1 == len(list((tmp_path / "profiles").iterdir()))
    first_round = next(number for number, line in enumerate(lines) if "round   1/3" in line)
    second_run = next(number for number, line in enumerate(lines) if line.startswith("[2/2]"))
    assert first_round < second_run


@pytest.mark.parametrize(
    ("options", "said"),
    [({"jobs": -1}, "--jobs -1"), ({"jobs": 2, "executor": "serial"}, "needs --executor processes")],
)
def test_options_that_do_not_fit_are_refused(job: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fedel.compare({**job, "workload": WORKLOAD}, METHODS, 1, progress=False, **options)
