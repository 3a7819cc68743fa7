"""A whole federation over mutual TLS, with agents whose certificates are renewed and revoked during the run."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig
from fedel_edge.session import _REFUSED_FAILURES
from fedel_services import guard

from fedel.desk.submit import create, follow, save_model
from fedel.errors import CertificateError
from fedel.plugins import Allowed
from fedel.security.folder import load
from fedel.security.identity import Identity
from fedel.security.tls import Tls
from fedel.training.settings import DataPart
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.retry import Backoff
from tests.agents.stand_ins import running
from tests.federation.support import job_of, until
from tests.federation.trainers import scale_of, spec_of
from tests.security.support import Pki, Servers, servers
from tests.services.coordinator.support import asynchronous
from tests.strategies.fakes import initial_model

CLIENTS = 2


def agent(made: Servers, folder: Path, index: int, tls: Tls) -> Agent:
    part = DataPart(index, CLIENTS)
    config = AgentConfig(
        made.coordinator_address,
        f"client-{index}",
        folder / f"state-{index}",
        data=part,
        tls=tls,
        code=Allowed(("tests",)),
    )
    return Agent(config)


async def run_to_the_end(made: Servers, operator: Tls, run: str, num_rounds: int = 3) -> pb.RunStatus:
    job = job_of({"name": "fedel"}, CLIENTS, num_rounds)
    spec = spec_of(scale_of(job))
    await create(made.coordinator_address, run, job, spec, initial_model(spec), operator)
    return await follow(made.coordinator_address, run, lambda _: None, operator)


@asynchronous
async def test_a_federation_finishes_over_mtls(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "ada")
    async with servers(tmp_path, pki) as made, AsyncExitStack() as stack:
        for index in range(CLIENTS):
            tls = pki.tls("agent", f"client-{index}")
            await stack.enter_async_context(running(agent(made, tmp_path, index, tls)))
        last = await run_to_the_end(made, operator, "night")
        assert (pb.RUN_PHASE_FINISHED, 3) == (last.phase, last.model_version), last.message
        await save_model(made.coordinator_address, "night", tmp_path / "model.safetensors", operator)
        accepted = made.aggregator.registry.get_sample_value("fedel_uploads_total", {"outcome": "accepted"})
        assert 3 * CLIENTS == accepted
        assert 0 == await made.refused("client") == await made.refused("role")


@asynchronous
async def test_agents_renew_by_themselves_and_go_on_past_the_old_certificates_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "RECHECK_SECONDS", 0.1)
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "ada")
    async with servers(tmp_path, pki) as made, AsyncExitStack() as stack:
        tls = [pki.tls("agent", f"client-{index}", days=8 / 86400) for index in range(CLIENTS)]
        first = [load(one.folder).facts for one in tls]
        agents = [agent(made, tmp_path, index, one) for index, one in enumerate(tls)]
        for one in agents:
            await stack.enter_async_context(running(one))
        assert pb.RUN_PHASE_FINISHED == (await run_to_the_end(made, operator, "evening")).phase
        await until(lambda: all(guard.utc_now() > facts.not_after for facts in first), "the old ones to expire")
        assert pb.RUN_PHASE_FINISHED == (await run_to_the_end(made, operator, "morning")).phase
        now = [load(one.folder).facts for one in tls]
        assert [f.identity for f in first] == [f.identity for f in now]
        assert all(old.serial != new.serial for old, new in zip(first, now, strict=True))
        assert [6, 6] == [one.counts["done"] for one in agents], "the same agents did both runs"
        assert 0 == await made.refused("expired")


@asynchronous
async def test_an_agent_takes_up_files_that_somebody_else_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its session being refused first: it redials as soon as it sees the new certificate."""
    monkeypatch.setattr("fedel_edge.certificates._LOOK_SECONDS", (0.05, 0.05))
    pki = Pki(tmp_path)
    tls = pki.tls("agent", "client-0")
    async with servers(tmp_path, pki) as made, running(agent(made, tmp_path, 0, tls)):
        fleet = made.coordinator.sessions
        await until(lambda: fleet.num_sessions == 1, "the session")
        session = fleet._sessions["client-0"]
        old = load(tls.folder).facts
        (tls.folder / "cert.pem").unlink()
        pki.authority.issue(tls.folder, old.identity)
        await until(
            lambda: fleet._sessions.get("client-0", session) is not session, "a session with the new one"
        )


@asynchronous
async def test_the_coordinator_dials_the_aggregator_with_its_new_certificate(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    operator = pki.tls("operator", "ada")
    async with servers(tmp_path, pki) as made, AsyncExitStack() as stack:
        for index in range(CLIENTS):
            tls = pki.tls("agent", f"client-{index}")
            await stack.enter_async_context(running(agent(made, tmp_path, index, tls)))
        assert pb.RUN_PHASE_FINISHED == (await run_to_the_end(made, operator, "evening")).phase
        pki.authority.revoke(Identity("service", "coordinator"))
        pki.tls("service", "coordinator")
        assert pb.RUN_PHASE_FINISHED == (await run_to_the_end(made, operator, "morning")).phase


@asynchronous
async def test_a_revoked_agent_is_cut_off_and_comes_back_once_it_is_enrolled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "RECHECK_SECONDS", 0.05)
    monkeypatch.setattr("fedel_edge.certificates._LOOK_SECONDS", (0.05, 0.05))
    monkeypatch.setattr("fedel.wire.retry.backoff_seconds", lambda *_: 0.05)
    pki = Pki(tmp_path)
    tls = pki.tls("agent", "client-0")
    async with servers(tmp_path, pki) as made, running(agent(made, tmp_path, 0, tls)):
        fleet = made.coordinator.sessions
        await until(lambda: fleet.num_sessions == 1, "the session")
        pki.authority.revoke(Identity("agent", "client-0"))
        await until(lambda: fleet.num_sessions == 0, "the session to be cut off")
        assert await made.refused("revoked") >= 1
        pki.tls("agent", "client-0")
        await until(lambda: fleet.num_sessions == 1, "the session with a new certificate")
    assert "refused: the certificate of agent 'client-0' is revoked" in caplog.text
    told = [record.getMessage() for record in caplog.records if record.name == "fedel_edge.session"]
    assert any(
        "once it is enrolled again, an agent connects by itself within a minute" in line for line in told
    )


def test_within_a_minute_is_what_a_refused_agent_waits_at_most() -> None:
    """As its log promises: it reads its certificate again whenever it dials."""
    waits = [Backoff(failures=failures).seconds for failures in (_REFUSED_FAILURES, 100) for _ in range(1000)]
    assert 3 < max(waits) < 60


@asynchronous
async def test_an_agent_has_the_name_of_its_certificate(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    tls = pki.tls("agent", "jetson-7")
    assert "jetson-7" == Agent(AgentConfig(tls=tls)).config.client
    with pytest.raises(CertificateError, match="not of agent 'other'"):
        Agent(AgentConfig(name="other", tls=tls))
    with pytest.raises(CertificateError, match="not of agent"):
        Agent(AgentConfig(tls=pki.tls("operator", "ada")))
    with pytest.raises(CertificateError, match=r"expired on .*enrol again"):
        Agent(AgentConfig(tls=pki.expired("agent", "jetson-7")))
