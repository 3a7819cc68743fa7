"""``fedel run``: where the coordinator keeps the run's directory on another machine, and runs that pause."""

import asyncio
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.numpy import save_file

from fedel.api import federation as run
from fedel.cli.local import Federation, LocalFleet
from fedel.data.model_input import ModelInput
from fedel.errors import ServiceError
from fedel.job import RunConfig
from fedel.report import runs
from fedel.roles import events as ev
from fedel.v1 import coordinator_pb2 as pb
from tests.federation.support import until
from tests.report.fakes import client_record, round_record
from tests.security.support import Pki, servers
from tests.services.coordinator.support import asynchronous
from tests.strategies.fakes import initial_model, spec


def test_the_directory_is_written_from_what_was_followed(tmp_path):
    job = RunConfig.parse({"strategy": {"name": "fedel"}, "seed": 7})
    status = pb.RunStatus(
        run="night", phase=pb.RUN_PHASE_FINISHED, created_at=time.time() - 60, model_version=2, message="done"
    )
    clients = (client_record(client="one", deviation=0.25, device_type="orin"),)
    records = [round_record(round=n, version=n + 1, accuracy=0.5 - 0.1 * n, clients=clients) for n in range(2)]
    run.write_directory(tmp_path, job, spec(), status, [record.to_json() for record in records])
    stored = runs.load(tmp_path)
    result = stored.result
    assert records == stored.rounds
    assert job == RunConfig.parse(stored.settings)
    assert result is not None
    assert ("night", "finished", "done", "fedel", 7) == (
        result.run,
        result.phase,
        result.message,
        result.strategy,
        result.seed,
    )
    assert (0.4, 0.5, 0, 1, 2) == (
        result.accuracy,
        result.best_accuracy,
        result.best_round,
        result.best_version,
        result.model_version,
    )
    assert (2, 0.25, "orin") == (
        result.clients["one"].rounds_measured,
        result.clients["one"].deviation_mean,
        result.clients["one"].device_type,
    )
    assert [t.name for t in spec().weights] == list(result.tensors)
    assert 60 == pytest.approx(result.wall_seconds, abs=30)
    assert result.virtual_seconds is None


@asynchronous
async def test_a_run_that_pauses_by_itself_ends_a_command_that_nobody_attends(tmp_path, monkeypatch):
    taken = ModelInput((4,), "float32", ("a", "b"))
    monkeypatch.setattr(run, "first_model", lambda _: (taken, spec(), initial_model()))
    pki = Pki(tmp_path)
    operator, job = pki.tls("operator", "ada"), RunConfig.parse({"strategy": {"name": "fedavg"}})
    async with servers(tmp_path, pki) as made:
        runs = made.coordinator.runs

        def follow(name, attended):
            console = Console(file=StringIO(), force_terminal=attended)
            words = made.coordinator_address, name, job, tmp_path / name, console, operator
            return asyncio.create_task(run.one_run(*words, attended=attended)), console.file

        script, shown = follow("script", False)
        person, screen = follow("person", True)
        await until(lambda: len(runs) == 2, "both runs")
        for one in runs.values():
            await one.control("pause")
        await until(
            lambda: "paused by an operator" in shown.getvalue(), "the pause of a person, which ends nothing"
        )
        for one in runs.values():
            await one.control("resume")
            await one.apply(ev.Stuck("the disk is on fire"))
        with pytest.raises(ServiceError, match="run 'script' paused: the disk is on fire; `fedel runs resume`"):
            await script
        await until(lambda: "the disk is on fire" in screen.getvalue(), "the reason on the screen")
        await runs["person"].control("stop_now")
        assert pb.RUN_PHASE_STOPPED == (await person).phase
        assert taken == ModelInput.load(tmp_path / "person")


@asynchronous
async def test_a_run_that_starts_from_a_file_says_so_here_and_not_to_others(tmp_path, monkeypatch):
    file = tmp_path / "mine.safetensors"
    save_file(initial_model(), file)
    taken = ModelInput((4,), "float32", ("a", "b"))
    monkeypatch.setattr(run, "first_model", lambda _: (taken, spec(), initial_model()))
    pki = Pki(tmp_path)
    job = RunConfig.parse({"strategy": {"name": "fedavg"}, "workload": {"initial": str(file)}})
    async with servers(tmp_path, pki) as made:
        words = made.coordinator_address, "night", job, tmp_path / "night", Console(file=StringIO())
        followed = asyncio.create_task(run.one_run(*words, pki.tls("operator", "ada")))
        await until(lambda: "night" in made.coordinator.runs, "the run")
        await made.coordinator.runs["night"].control("stop_now")
        await followed
    result = runs.load(tmp_path / "night").result
    assert result is not None
    assert result.origin is not None
    assert str(file) == result.origin.file
    kept_by_servers = [
        path for path in tmp_path.rglob("*") if path.is_file() and (tmp_path / "night") not in path.parents
    ]
    assert kept_by_servers
    assert [] == [path for path in kept_by_servers if b"mine.safetensors" in path.read_bytes()]


def test_the_federation_of_a_command_ends_with_it(tmp_path, monkeypatch):
    async def paused(*_, **__):
        raise ServiceError("run 'night' paused: no space")

    monkeypatch.setattr(run, "one_run", paused)
    federation = Federation(tmp_path, tmp_path, LocalFleet())
    with pytest.raises(ServiceError, match=r"no space\nThis command started .* logs are in") as raised:
        asyncio.run(run.watched(federation, "night", RunConfig(), tmp_path, Console()))
    assert raised.value.exit_code != 0


def test_a_command_that_is_terminated_says_so_and_ends_its_processes(tmp_path):
    job = tmp_path / "job.toml"
    workload = '[workload]\nmodel = "cnn"\ndata = "digits"\n'
    job.write_text(f"{workload}[rounds]\nmin_clients = 9\n[fleet]\nslowdowns = [1]\n")
    words = [sys.executable, "-m", "fedel.cli.main", "run", str(job), "--name", "night", "--json"]
    command = subprocess.Popen(
        [*words, "--out", str(tmp_path)], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    with command:
        assert command.stderr is not None
        assert "live page" in command.stderr.readline()
        children = [path for path in Path("/proc").glob("[0-9]*") if parent(path) == command.pid]
        command.send_signal(signal.SIGTERM)
        said = command.stderr.read()
        assert 128 + signal.SIGTERM == command.wait(60)
    assert "fedel run: stopped before its end: another process sent SIGTERM" in said
    assert "Traceback" not in said
    assert len(children) == 3
    assert not any(path.exists() for path in children)


def parent(process):
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
