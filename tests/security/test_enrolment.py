"""A device without a certificate, a token, and a coordinator that signs: over real connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio

from fedel.errors import CertificateError, ServiceError
from fedel.security.folder import load
from fedel.security.identity import Identity
from fedel.security.tls import Tls
from fedel.security.tokens import Token
from fedel.v1 import coordinator_pb2, enrolment_pb2
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.v1.enrolment_pb2_grpc import EnrolmentServiceStub
from fedel.wire.channel import connect
from fedel.wire.enrol import enrol, fetch_authority, renew
from fedel.wire.protocol import PROTOCOL
from tests.security.support import Pki, Servers, refusal, servers
from tests.services.coordinator.support import asynchronous

DEVICE = Identity("agent", "jetson-1")


async def enrolled(made: Servers, token: Token, folder: Path) -> Identity:
    address = made.enrolment_address
    ca = await asyncio.to_thread(fetch_authority, address, token.fingerprint)
    return (await enrol(address, token, folder, ca)).facts.identity


@asynchronous
async def test_a_token_gets_a_certificate_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pki = Pki(tmp_path)
    token = pki.authority.promise(DEVICE)
    async with servers(tmp_path, pki) as made:
        assert DEVICE == await enrolled(made, token, tmp_path / "device")
        async with connect(made.coordinator_address, Tls(dir=str(tmp_path / "device"))) as channel:
            call = CoordinatorServiceStub(channel).Session()
            hello = coordinator_pb2.Hello(client=DEVICE.name, protocol=PROTOCOL)
            await call.write(coordinator_pb2.SessionRequest(hello=hello))
            assert "welcome" == (await call.read()).WhichOneof("kind")
            call.cancel()
        with pytest.raises(ServiceError, match="unknown, used or expired"):
            await enrolled(made, token, tmp_path / "thief")
        assert 1 == await made.refused("token")
    assert not (tmp_path / "thief" / "cert.pem").exists()
    assert "refused: the token is unknown, used or expired" in caplog.text


@asynchronous
async def test_the_first_contact_is_with_the_authority_of_the_token_or_with_nobody(tmp_path: Path) -> None:
    pki, other = Pki(tmp_path), Pki(tmp_path / "other")
    token = other.authority.promise(DEVICE)
    async with servers(tmp_path, pki) as made:
        with pytest.raises(CertificateError, match="another fingerprint"):
            await enrolled(made, token, tmp_path / "device")
    assert not (tmp_path / "device").exists(), "nothing was made and nothing sent"


@asynchronous
async def test_the_secret_goes_to_a_server_with_the_right_name_alone(tmp_path: Path) -> None:
    """Showing the right authority is easy, it is public; a certificate for the address is not."""
    pki = Pki(tmp_path)
    token = pki.authority.promise(DEVICE)
    own = load(pki.tls("agent", "mallory").folder)
    server = aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(own.key, own.cert)]))
    await server.start()
    address = f"127.0.0.1:{port}"
    ca = await asyncio.to_thread(fetch_authority, address, token.fingerprint)
    with pytest.raises(ServiceError, match=address):
        await enrol(address, token, tmp_path / "device", ca)
    await server.stop(0)
    assert [DEVICE] == [grant.identity for grant, _ in pki.authority.promises()], "the token is still good"


@asynchronous
async def test_nothing_else_is_on_the_enrolment_port_and_enrol_is_on_no_other(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    credentials = grpc.ssl_channel_credentials(load(pki.tls("agent", "a").folder).ca)
    async with servers(tmp_path, pki) as made:
        async with aio.secure_channel(made.enrolment_address, credentials) as channel:
            runs = CoordinatorServiceStub(channel).ListRuns(coordinator_pb2.ListRunsRequest())
            assert ("UNIMPLEMENTED", "") == await refusal(runs)
            stub = EnrolmentServiceStub(channel)
            assert ("UNAUTHENTICATED", "certificate") == await refusal(stub.Renew(enrolment_pb2.RenewRequest()))
            enrolling = stub.Enrol(enrolment_pb2.EnrolRequest(secret="x", signing_request=b"y"))
            assert ("INVALID_ARGUMENT", "request") == await refusal(enrolling)
        async with connect(made.coordinator_address, pki.tls("agent", "a")) as channel:
            enrolling = EnrolmentServiceStub(channel).Enrol(enrolment_pb2.EnrolRequest())
            assert ("PERMISSION_DENIED", "role") == await refusal(enrolling)


@asynchronous
async def test_a_certificate_is_renewed_over_mtls_unless_it_is_revoked(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    tls = pki.due("service", "shard-2")
    before = load(tls.folder).facts
    async with servers(tmp_path, pki) as made:
        async with connect(made.coordinator_address, tls) as channel:
            after = (await renew(channel, tls.folder)).facts
        assert (before.identity, before.hosts) == (after.identity, after.hosts)
        assert before.serial != after.serial
        pki.authority.revoke(before.identity)
        async with connect(made.coordinator_address, tls) as channel:
            with pytest.raises(ServiceError, match="is revoked"):
                await renew(channel, tls.folder)
