"""The real testbed, if there is a Docker Engine: its job succeeds although the aggregator is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTBED = Path(__file__).parents[2] / "docker" / "testbed.sh"
SECONDS = 600.0
pytestmark = pytest.mark.slow


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker Engine answers")
    if not docker("image", "ls", "-q", "fedel-agent") or not docker("image", "ls", "-q", "fedel-server"):
        pytest.skip("no images: `make images`")
    if docker("ps", "--all", "-q", "--filter", "name=fedel_") or docker(
        "volume", "ls", "-q", "--filter", "name=fedel_"
    ):
        pytest.skip("a testbed exists already: `docker/testbed.sh down --volumes` removes it")
    surroundings = {**os.environ, "COMPOSE_PROFILES": ""}
    with (tmp_path / "up.log").open("wb") as log:
        process = subprocess.Popen([TESTBED, "up"], stdout=log, stderr=log, env=surroundings)
    yield process
    process.kill()
    process.wait()
    subprocess.run([TESTBED, "down", "--volumes"], env=surroundings, check=True, capture_output=True)


def ask(path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:7080/api/runs{path}", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def in_mid_round(process: subprocess.Popen[bytes]) -> str:
    """Wait until some but not all updates of a round are acknowledged; the run's name."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "the job ended before it could be disturbed"
        try:
            name = ask("")["runs"][0]["run"]
            now = ask(f"/{name}")["open_round"]
        except (OSError, IndexError):
            now = None
        if now and now["phase"] == "train" and 0 < now["num_done"] < now["num_tasks"]:
            return str(name)
        time.sleep(0.1)
    raise AssertionError("no round began")


def test_a_killed_aggregator_loses_nothing(job: subprocess.Popen[bytes]) -> None:
    name = in_mid_round(job)
    container = docker("ps", "-q", "--filter", "name=fedel_aggregator", "--filter", "name=fedel-aggregator")
    subprocess.run(["docker", "exec", container, "sh", "-c", "kill -9 -1"], check=False, capture_output=True)
    assert 0 == job.wait(SECONDS)
    assert "1" == docker("inspect", "--format", "{{.RestartCount}}", container)
    rounds = ask(f"/{name}/rounds")["rounds"]
    assert [4] * 6 == [each["num_updates"] for each in rounds]
    assert [0] * 6 == [each["num_late"] for each in rounds]
