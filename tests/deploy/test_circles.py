"""Servers run without what only devices have, agents without what only servers have."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedel.cli.main import VERBS
from tests.deploy.circles import ROOT, command, direct, fedel, installed

HEAVY = {"torch", "transformers", "pillow", "matplotlib", "scikit-learn", "rich"}
OF_SERVERS = {"sqlalchemy", "aiohttp", "grpcio-reflection", "psycopg"}
START_SECONDS = 60.0


def test_servers_have_no_torch_and_devices_no_database() -> None:
    assert not HEAVY & installed("server")
    assert not (OF_SERVERS | {"torch"}) & installed("edge-own-torch")
    assert not OF_SERVERS & direct("edge").keys()
    assert not (HEAVY | OF_SERVERS) & direct("").keys()
    assert {"torch"} == direct("edge").keys() - direct("edge-own-torch").keys()


@pytest.mark.parametrize("verb", [verb for verb, each in VERBS.items() if each.extra != "desk"])
def test_a_verb_needs_only_its_extra(verb: str) -> None:
    extra = VERBS[verb].extra.replace("edge", "edge-own-torch")
    done = fedel(extra, verb, "--help")
    assert (0, "") == (done.returncode, done.stderr)
    assert f"usage: fedel {verb}" in done.stdout


@pytest.mark.parametrize(
    ("verb", "package"),
    [("coordinator", "sqlalchemy"), ("aggregator", "aiohttp"), ("agent", "msgspec"), ("preflight", "rich")],
)
def test_a_missing_package_is_named_with_its_extra(verb: str, package: str) -> None:
    done = fedel(VERBS[verb].extra, verb, "--set", "listen=127.0.0.1:0", without=package)
    assert 2 == done.returncode
    assert f"fedel {verb}: the package '{package}' is not installed" in done.stderr
    assert f"pip install 'fedel[{VERBS[verb].extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def running(folder: Path, extra: str, name: str, settings: dict[str, object]) -> Iterator[Path]:
    """A server or agent in its circle; yields the file with its address. It must end well on SIGTERM."""
    verb, address, log = name.partition("-")[0], folder / f"{name}.address", folder / f"{name}.log"
    words = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    with log.open("wb") as output:
        process = subprocess.Popen(command(extra, verb, *words), stdout=output, stderr=output, cwd=folder)
    try:
        deadline = time.monotonic() + START_SECONDS
        while "port_file" in settings and not address.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield address
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(START_SECONDS), log.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_federation_runs_with_each_process_in_its_circle(tmp_path: Path) -> None:
    def server(name: str) -> dict[str, object]:
        ports = {
            "port_file": str(tmp_path / f"{name}.address"),
            "http_port_file": str(tmp_path / f"{name}.http"),
        }
        return {"listen": "127.0.0.1:0", "http": "127.0.0.1:0", **ports}

    shutil.copy(ROOT / "examples" / "own.py", tmp_path)  # where the agent is started
    with running(tmp_path, "server", "aggregator", {**server("aggregator"), "data_dir": "data"}) as address:
        settings = {**server("coordinator"), "aggregators": [address.read_text().strip()]}
        with running(tmp_path, "server", "coordinator", settings) as address:
            coordinator = address.read_text().strip()
            agent = {"name": "agent-1", "coordinator": coordinator, "state_dir": "state", "threads": 1}
            agent["code.allow"] = ["own"]
            with running(tmp_path, "edge", "agent", agent | {"evaluate": True}):
                words = ["--coordinator", coordinator, "--out", str(tmp_path / "here"), "--json"]
                for setting in (
                    "rounds.num_rounds=1",
                    "rounds.min_clients=1",
                    "workload.data_options.num_samples=200",
                ):
                    words += ["--set", setting]
                done = fedel("desk", "run", str(ROOT / "examples" / "own.toml"), *words)
    assert 0 == done.returncode, done.stderr
    assert "finished" == json.loads(done.stdout)["phase"]
