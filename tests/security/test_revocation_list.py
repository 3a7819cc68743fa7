"""Servers on other machines fetch the signed list themselves, and believe only a newer one of the authority."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from fedel_services import guard, revocation_list

from fedel.errors import CertificateError
from fedel.security import certificates as x
from fedel.security.folder import CRL, Revocations, Watched, load
from fedel.security.identity import Identity
from fedel.security.tls import Tls
from fedel.v1 import aggregator_pb2, coordinator_pb2, enrolment_pb2
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.v1.enrolment_pb2_grpc import EnrolmentServiceStub
from fedel.wire.channel import connect
from tests.federation.support import until
from tests.security.support import Pki, refusal, servers
from tests.services.coordinator.support import asynchronous

EVE = Identity("agent", "eve")
GET = enrolment_pb2.GetRevocationListRequest()


def elsewhere(pki: Pki, source: str, seconds: float = 0.05) -> Tls:
    """A service that cannot read the authority's folder."""
    tls = pki.tls("service", "aggregator")
    return dataclasses.replace(tls, crl="", crl_from=source, crl_seconds=seconds)


@asynchronous
async def test_an_aggregator_elsewhere_refuses_what_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "RECHECK_SECONDS", 0.05)
    pki = Pki(tmp_path)
    eve = pki.tls("agent", "eve")
    # The coordinator's port is known when it listens, which is after the aggregator has started.
    async with servers(tmp_path, pki) as made:
        tls = elsewhere(pki, made.coordinator_address)
        async with servers(tmp_path / "two", pki, aggregator_tls=tls) as other:
            async with connect(other.aggregator_address, eve) as channel:
                stub = AggregatorServiceStub(channel)

                async def code() -> str:
                    return (await refusal(stub.GetModel(aggregator_pb2.GetModelRequest(run="x")).read()))[0]

                assert "NOT_FOUND" == await code(), "it gets in"
                pki.authority.revoke(EVE)
                await until(lambda: revoked_in_file(tls.folder / CRL, pki, eve), "the list to arrive")
                assert "UNAUTHENTICATED" == await code()
            registry = other.aggregator.registry
            assert registry.get_sample_value("fedel_revocation_list_fetched_timestamp_seconds")


def revoked_in_file(path: Path, pki: Pki, tls: Tls) -> bool:
    if not path.exists():
        return False
    found = x.read_revocation_list(path.read_bytes(), [pki.authority.ca], str(path))
    return load(tls.folder).facts.serial in found.revoked


@asynchronous
async def test_only_services_get_the_list(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    async with servers(tmp_path, pki) as made:
        async with connect(made.coordinator_address, pki.tls("service", "s")) as channel:
            answer = await EnrolmentServiceStub(channel).GetRevocationList(GET)
            assert pki.authority.signed_list() == answer.revocation_list
        async with connect(made.coordinator_address, pki.tls("viewer", "v")) as channel:
            call = EnrolmentServiceStub(channel).GetRevocationList(GET)
            assert ("PERMISSION_DENIED", "role") == await refusal(call)


def test_an_older_or_foreign_list_is_not_taken(tmp_path: Path) -> None:
    pki, other = Pki(tmp_path), Pki(tmp_path / "other")
    first = pki.authority.signed_list()
    own = load(pki.tls("agent", "eve").folder)
    pki.authority.revoke(EVE)
    second = pki.authority.signed_list()
    path = tmp_path / "kept.pem"
    revocations = Revocations(path, Watched(tmp_path / "agent-eve"))
    assert revocations.install(second, "the network")
    assert not revocations.install(second, "the network"), "nothing new"
    for wrong, why in (
        (first, "is older than"),
        (other.authority.signed_list(), "not signed by"),
        (b"", "not a"),
    ):
        with pytest.raises(CertificateError, match=why):
            revocations.install(wrong, "the network")
    assert second == path.read_bytes()
    assert own.facts.serial in Revocations(path, Watched(tmp_path / "agent-eve")), "kept for the next start"
    path.write_bytes(first)
    assert own.facts.serial in revocations


def test_each_list_has_a_higher_number(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    numbers = []
    for name in ("a", "b", "c"):
        pki.tls("agent", name)
        pki.authority.revoke(Identity("agent", name))
        numbers.append(x.read_revocation_list(pki.authority.signed_list(), [pki.authority.ca], CRL).number)
    assert numbers == sorted(set(numbers))


@asynchronous
async def test_a_list_that_does_not_come_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(revocation_list, "LONG", 3)
    pki = Pki(tmp_path)
    tls = elsewhere(pki, "127.0.0.1:1", 0.01)
    async with servers(tmp_path, pki, aggregator_tls=tls) as made:
        await until(lambda: "still get in here" in caplog.text, "the line in the log")
        assert 0 == made.aggregator.registry.get_sample_value("fedel_revocation_list_fetched_timestamp_seconds")
        async with connect(made.coordinator_address, pki.tls("operator", "ada")) as channel:
            await CoordinatorServiceStub(channel).ListRuns(coordinator_pb2.ListRunsRequest())
    levels = [r.levelno for r in caplog.records if "no revocation list from 127.0.0.1:1" in r.getMessage()]
    assert [logging.WARNING, logging.ERROR] == levels[:2]
