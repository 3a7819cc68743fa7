"""Keys of secure aggregation over mutual TLS: signed by their client; a coordinator cannot change them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from fedel_coordinator import messages
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig

from fedel.core.secure_sum import KEY_BYTES
from fedel.desk.submit import create, follow
from fedel.errors import CertificateError
from fedel.job import Protection
from fedel.plugins import Allowed
from fedel.security.certificates import utc_now
from fedel.security.folder import load
from fedel.security.signed_keys import NO_PROOF, check, sign
from fedel.training.settings import DataPart
from fedel.v1 import coordinator_pb2 as pb
from tests.agents.stand_ins import running
from tests.federation.support import job_of, until
from tests.federation.trainers import scale_of, spec_of
from tests.security.support import Pki, Servers, servers
from tests.services.coordinator.support import asynchronous
from tests.strategies.fakes import initial_model

CLIENTS = 3


def test_only_the_client_can_sign(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    own, other = (load(pki.tls("agent", name).folder) for name in ("client-0", "client-1"))
    stranger = load(Pki(tmp_path / "elsewhere").tls("agent", "client-0").folder)
    person = load(pki.tls("operator", "client-0").folder)
    proof, now = sign(own, b"keys"), utc_now()
    check(other, "client-0", b"keys", proof, now)
    for who, text, shown, when in (
        ("client-0", b"other keys", proof, now),
        ("client-1", b"keys", proof, now),
        ("client-0", b"keys", sign(other, b"keys"), now),
        ("client-0", b"keys", sign(stranger, b"keys"), now),
        ("client-0", b"keys", sign(person, b"keys"), now),
        ("client-0", b"keys", proof._replace(certificate=sign(other, b"keys").certificate), now),
        ("client-0", b"keys", NO_PROOF, now),
        ("client-0", b"keys", proof, now + timedelta(days=1000)),
    ):
        with pytest.raises(CertificateError, match="client-"):
            check(other, who, text, shown, when)


async def start(stack: AsyncExitStack, made: Servers, folder: Path) -> list[Agent]:
    agents = []
    for index in range(CLIENTS):
        name = f"client-{index}"
        tls, part = made.pki.tls("agent", name), DataPart(index, CLIENTS)
        config = AgentConfig(
            made.coordinator_address,
            name,
            folder / f"state-{index}",
            data=part,
            tls=tls,
            code=Allowed(("tests",)),
        )
        agents.append(Agent(config))
        await stack.enter_async_context(running(agents[-1]))
    job = replace(job_of({"name": "fedavg"}, CLIENTS, 2), protection=Protection(secure=True))
    spec, operator = spec_of(scale_of(job)), made.pki.tls("operator", "ada")
    await create(made.coordinator_address, "night", job, spec, initial_model(spec), operator)
    return agents


@asynchronous
async def test_a_secure_run_over_mtls(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    async with servers(tmp_path, pki) as made, AsyncExitStack() as stack:
        await start(stack, made, tmp_path)
        last = await follow(made.coordinator_address, "night", lambda _: None, pki.tls("operator", "ada"))
        assert (pb.RUN_PHASE_FINISHED, 2) == (last.phase, last.model_version), last.message


@asynchronous
async def test_a_coordinator_that_changes_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = messages.member_to_pb

    def lie(client, keys, *rest):
        wrong = keys._replace(masking=bytes(range(KEY_BYTES))) if client == "client-1" else keys
        return honest(client, wrong, *rest)

    monkeypatch.setattr(messages, "member_to_pb", lie)
    async with servers(tmp_path, Pki(tmp_path)) as made, AsyncExitStack() as stack:
        agents = await start(stack, made, tmp_path)
        await until(lambda: all(agent.counts["failed"] for agent in agents), "all to notice it")
        accepted = made.aggregator.registry.get_sample_value("fedel_uploads_total", {"outcome": "accepted"})
        assert not accepted
