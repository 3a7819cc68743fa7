"""``fedel preflight`` on a good device and on broken ones, against real servers with real certificates."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fedel_edge.config import AgentConfig
from fedel_edge.preflight import machine
from fedel_edge.preflight.findings import BAD, GOOD, SKIPPED, Finding
from fedel_edge.preflight.flight import certificate, device
from fedel_edge.preflight.flight import servers as servers_found
from fedel_services import health
from rich.console import Console

from fedel.cli.main import main
from fedel.cli.preflight import show
from fedel.job import RunConfig
from fedel.security.identity import Identity
from fedel.security.tls import Tls
from fedel.training.settings import DataPart
from tests.security.support import Pki, Servers, servers
from tests.services.coordinator.support import asynchronous

JOB = RunConfig.parse(
    {
        "workload": {"model": "vgg16", "data": "digits", "model_options": {"width": 0.125}},
        "work": {"batch_size": 4},
    }
)
UNUSED = "127.0.0.1:9"
"""No server listens on the port of the discard service."""


@pytest.fixture(autouse=True)
def _any_disk_and_memory_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEAST_DISK_BYTES", 1e6)
    monkeypatch.setattr(machine, "LEAST_MEMORY_BYTES", 1e6)


@asynccontextmanager
async def good_device(folder: Path) -> AsyncIterator[tuple[AgentConfig, Servers]]:
    pki = Pki(folder)
    async with servers(folder, pki) as made:
        tls = pki.tls("agent", "jetson-1")
        part = DataPart(0, 2, "iid")
        yield (
            AgentConfig(made.coordinator_address, state_dir=folder / "state", data=part, tls=tls, threads=1),
            made,
        )


def shown(findings: Iterable[Finding]) -> dict[str, Finding]:
    """By check; also printed as a user sees them (`pytest -s`)."""
    console, by_check = Console(highlight=False), {}
    for finding in findings:
        show(finding, console)
        assert (finding.state != BAD) or finding.remedy, f"{finding.check} is red and has no remedy"
        by_check[finding.check] = finding
    return by_check


async def dialled(config: AgentConfig) -> dict[str, Finding]:
    return shown([finding async for finding in servers_found(config)])


def red(findings: dict[str, Finding]) -> list[str]:
    return [check for check, finding in findings.items() if finding.state == BAD]


@asynchronous
async def test_good_servers_are_green(tmp_path: Path) -> None:
    async with good_device(tmp_path) as (config, made):
        findings = await dialled(config)
    assert ["certificate", "coordinator", "clock", "aggregator"] == list(findings)
    assert {GOOD} == {finding.state for finding in findings.values()}
    assert findings["certificate"].said.startswith("agent 'jetson-1', for 30.0 days more")
    assert made.aggregator_address in findings["aggregator"].said


def test_a_good_device_is_green(tmp_path: Path) -> None:
    config = AgentConfig(state_dir=tmp_path, threads=1, data=DataPart(0, 2, "iid"))
    findings = shown(device(config, JOB))
    assert ["disk", "memory", "torch", "data set", "one step"] == list(findings)
    assert {GOOD} == {finding.state for finding in findings.values()}
    assert "749 of 1498 training samples" in findings["data set"].said
    assert "4 samples of vgg16" in findings["one step"].said


@asynchronous
async def test_no_server_at_the_port(tmp_path: Path) -> None:
    config = AgentConfig(UNUSED, state_dir=tmp_path, tls=Pki(tmp_path).tls("agent", "jetson-1"))
    findings = await dialled(config)
    assert ["coordinator"] == red(findings)
    assert "nobody listens on port 9" in findings["coordinator"].said
    assert SKIPPED == findings["clock"].state


@asynchronous
async def test_unknown_host_name(tmp_path: Path) -> None:
    tls = Pki(tmp_path).tls("agent", "jetson-1")
    findings = await dialled(AgentConfig("no-such-host.invalid:7070", state_dir=tmp_path, tls=tls))
    assert "nobody knows the name" in findings["coordinator"].said


@asynchronous
async def test_expired_and_wrong_certificates(tmp_path: Path) -> None:
    async with good_device(tmp_path) as (config, made):
        expired = await dialled(replace(config, tls=made.pki.expired("agent", "jetson-1")))
        other = certificate(replace(config, name="jetson-2"))[0]
        operators = certificate(replace(config, tls=made.pki.tls("operator", "ada")))[0]
        missing = certificate(replace(config, tls=Tls(dir=str(tmp_path / "nowhere"))))[0]
    assert ["certificate"] == red(expired), "then the servers are not called"
    assert "expired on" in expired["certificate"].said
    assert "not of agent 'jetson-2'" in other.said
    assert "operator 'ada'" in operators.said
    assert BAD == missing.state


@asynchronous
async def test_certificate_of_another_federation(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with good_device(tmp_path) as (config, _):
        findings = await dialled(replace(config, tls=Pki(tmp_path / "other").tls("agent", "jetson-1")))
    assert ["coordinator"] == red(findings)
    assert "another federation's server" in findings["coordinator"].remedy


@asynchronous
async def test_name_not_in_the_servers_certificate(tmp_path: Path) -> None:
    async with good_device(tmp_path) as (config, made):
        port = made.coordinator_address.rpartition(":")[2]
        findings = await dialled(replace(config, coordinator=f"127.1:{port}"))
    assert ["coordinator"] == red(findings)
    assert "--host NAME" in findings["coordinator"].remedy


@asynchronous
async def test_revoked_certificate(tmp_path: Path) -> None:
    async with good_device(tmp_path) as (config, made):
        made.pki.authority.revoke(Identity("agent", "jetson-1"))
        findings = await dialled(config)
    assert ["coordinator"] == red(findings)
    assert "is revoked" in findings["coordinator"].said


@asynchronous
@pytest.mark.parametrize(("off", "word"), [(90.0, "behind"), (-90.0, "ahead of")])
async def test_wrong_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: float, word: str) -> None:
    monkeypatch.setattr(health, "now", lambda: time.time() + off)
    async with good_device(tmp_path) as (config, _):
        findings = await dialled(config)
    assert ["clock"] == red(findings)
    assert f"s {word} the coordinator" in findings["clock"].said
    assert "timedatectl" in findings["clock"].remedy


@asynchronous
async def test_no_aggregator(tmp_path: Path) -> None:
    async with good_device(tmp_path) as (config, _):
        pass
    pki = Pki(tmp_path / "again")
    async with servers(tmp_path / "again", pki, public_aggregators=(UNUSED,)) as made:
        tls = pki.tls("agent", "jetson-1")
        findings = await dialled(replace(config, coordinator=made.coordinator_address, tls=tls))
    assert ["aggregator"] == red(findings)


def test_no_gpu(tmp_path: Path) -> None:
    findings = shown(device(AgentConfig(state_dir=tmp_path, device="cuda:7"), JOB))
    assert "torch" in red(findings)
    assert SKIPPED == findings["one step"].state


def test_missing_data_set(tmp_path: Path) -> None:
    job = replace(JOB, workload=replace(JOB.workload, data="cifar10"))
    findings = shown(device(AgentConfig(state_dir=tmp_path, data=DataPart(root=str(tmp_path))), job))
    assert ["data set"] == red(findings)
    assert "fedel data get cifar10" in findings["data set"].said
    assert str(tmp_path) in findings["data set"].remedy


def test_too_little_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  4000000 kB\nMemFree: 1 kB\nMemAvailable:  400000 kB\n")
    monkeypatch.setattr(machine, "LEAST_DISK_BYTES", 1e18)
    findings = shown([machine.disk(AgentConfig(state_dir=tmp_path / "a/b")), machine.memory(tmp_path)])
    assert ["disk", "memory"] == red(findings)
    assert "0.4 GB of 4.1 GB free" == findings["memory"].said


def test_no_certificate_for_another_machine(tmp_path: Path) -> None:
    finding, own = certificate(AgentConfig("server.lan:7070", state_dir=tmp_path))
    assert (BAD, None) == (finding.state, own)
    assert "fedel certs" in finding.remedy


def test_exit_code_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--set", f"coordinator={UNUSED}", "--set", f"state_dir={tmp_path}")
    assert 1 == main(["preflight", *settings, "--set", "device=cuda:7", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert {"check": "coordinator", "state": "bad"}.items() <= result["findings"][1].items()
