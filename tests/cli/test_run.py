"""``fedel run``: runs at a federation elsewhere that pause, are stopped, are left and are taken up again."""

import asyncio
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.numpy import save_file

from fedel.api import federation as run
from fedel.data.model_input import ModelInput
from fedel.desk.local import Federation, LocalFleet
from fedel.desk.submit import control, create
from fedel.errors import ConfigError, ServiceError
from fedel.job import RunConfig
from fedel.report import runs
from fedel.roles import events as ev
from fedel.v1 import coordinator_pb2 as pb
from tests.federation.support import until
from tests.security.support import Pki, servers
from tests.services.coordinator.support import Federation as CoordinatorFederation
from tests.services.coordinator.support import asynchronous
from tests.strategies.fakes import initial_model, spec


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
        await runs["person"].control("stop_now", "operator 'ada'", "enough")
        status = await person
        assert pb.RUN_PHASE_STOPPED == status.phase
        said = (
            "run 'person' stopped by operator 'ada' before its first round: enough; model so far: here/model."
        )
        assert f"{said}safetensors" == run._why_it_ended(status, Path("here"))
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


@asynchronous
async def test_who_stops_a_run_is_named_by_the_certificate(tmp_path):
    pki, job = Pki(tmp_path), RunConfig.parse({"strategy": {"name": "fedavg"}})
    ada = pki.tls("operator", "ada")
    async with servers(tmp_path, pki) as made:
        await create(made.coordinator_address, "night", job, spec(), initial_model(), ada)
        status = await control(made.coordinator_address, "night", pb.RUN_ACTION_PAUSE, ada, "lunch\x1b[2J")
        assert status.message.startswith("paused by operator 'ada': lunch [2J; `fedel runs resume` goes on")
        status = await control(made.coordinator_address, "night", pb.RUN_ACTION_STOP_NOW, ada)
        assert "stopped by operator 'ada' before its first round" == status.message


def test_a_fleet_that_is_smaller_than_min_reports_is_refused(tmp_path):
    job = {"rounds": {"min_reports": 3}, "fleet": {"slowdowns": [1, 2]}}
    with pytest.raises(
        ConfigError, match=r"min_reports = 3, but \[fleet\] has 2 agents: no round would ever close"
    ):
        run.run(job, out=tmp_path, progress=False)


class LeftRun:
    """``fedel run --coordinator`` as a process that Ctrl-C ends once it follows its run."""

    def __init__(self, folder, address, *options):
        job = folder / "job.toml"
        job.write_text('[workload]\nmodel = "cnn"\ndata = "digits"\n')
        words = [sys.executable, "-m", "fedel.cli.main", "run", str(job), "--name", "night", "--out", "runs"]
        self.process = subprocess.Popen(
            [*words, "--coordinator", address, *options],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def leave(self):
        with self.process as process:
            line = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            told = process.stderr.read()
            return line, told, process.wait(60)


@asynchronous
async def test_a_run_that_is_left_goes_on_and_is_taken_up_again(tmp_path):
    async with CoordinatorFederation(tmp_path) as federation:
        line, told, code = await asyncio.to_thread(LeftRun(tmp_path, federation.address).leave)
        assert (
            "waiting for clients: waits for 1 more client; no agent is connected\n",
            128 + signal.SIGINT,
        ) == (line, code)
        assert f"stopped; run 'night' goes on at {federation.address}" in told
        for hint in ("status night", "runs fetch night", "runs stop night"):
            assert f"fedel {hint} --coordinator {federation.address}" in told
        assert not federation.coordinator.runs["night"].ended
        again = LeftRun(tmp_path, federation.address, "--stop-on-exit")
        line, told, _ = await asyncio.to_thread(again.leave)
        assert "waiting for clients: waits for 1 more client; no agent is connected\n" == line, (
            "its folder is taken up again"
        )
        assert "run 'night' stops after its open round" in told
        assert [] == await federation.finished("night")


def test_the_federation_of_a_command_ends_with_it(tmp_path, monkeypatch):
    async def paused(*_, **__):
        raise ServiceError("run 'night' paused: no space")

    monkeypatch.setattr(run, "one_run", paused)
    federation = Federation(tmp_path, tmp_path, LocalFleet())
    with pytest.raises(ServiceError, match=r"no space\nThis command started .* logs are in") as raised:
        asyncio.run(run.watched(federation, "night", RunConfig(), tmp_path, Console()))
    assert raised.value.exit_code != 0


@pytest.mark.parametrize("sigint", ["-", "''"], ids=["in front", "in the background of a script"])
def test_a_command_that_is_terminated_says_so_and_ends_its_processes(tmp_path, sigint):
    job = tmp_path / "job.toml"
    workload = '[workload]\nmodel = "cnn"\ndata = "digits"\n'
    job.write_text(f"{workload}[rounds]\nmin_clients = 9\n[fleet]\nslowdowns = [1]\n")
    words = [sys.executable, "-m", "fedel.cli.main", "run", str(job), "--name", "night", "--json"]
    shell = ["sh", "-c", f'trap {sigint} INT; exec "$@"', "sh"]
    command = subprocess.Popen(
        [*shell, *words, "--out", str(tmp_path)], cwd=tmp_path, stderr=subprocess.PIPE, text=True
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
