"""Real handshakes over real gRPC: who gets in, who does not, with which status, and what the log says."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import pytest
from fedel_aggregator.server import SERVICE as AGGREGATOR
from fedel_coordinator.server import SERVICE as COORDINATOR
from fedel_services import first_messages, guard
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedel.security.folder import load
from fedel.security.identity import RULES, Identity
from fedel.security.tls import Tls
from fedel.v1 import aggregator_pb2, coordinator_pb2, task_pb2
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.protocol import PROTOCOL
from tests.federation.support import until
from tests.security.support import Pki, Servers, refusal, servers
from tests.services.coordinator.support import asynchronous

LIST = coordinator_pb2.ListRunsRequest()


async def list_runs(address: str, tls: Tls) -> coordinator_pb2.ListRunsResponse:
    async with connect(address, tls) as channel:
        return await CoordinatorServiceStub(channel).ListRuns(LIST)


@asynchronous
async def test_operators_viewers_and_services_get_in(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    async with servers(tmp_path, pki) as made:
        for role in ("operator", "viewer"):
            await list_runs(made.coordinator_address, pki.tls(role, "ada"))
        for address, service in (
            (made.coordinator_address, COORDINATOR),
            (made.aggregator_address, AGGREGATOR),
        ):
            async with connect(address, pki.tls("service", "probe")) as channel:
                request = health_pb2.HealthCheckRequest(service=service)
                answer = await health_pb2_grpc.HealthStub(channel).Check(request)
                assert health_pb2.HealthCheckResponse.SERVING == answer.status
        expiry = load(Path(made.coordinator.config.tls.dir)).facts.not_after.timestamp()
        assert expiry == await made.metric("fedel_certificate_expiry_timestamp_seconds")


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("no certificate", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ("plain text", "WRONG_VERSION_NUMBER"),
        ("wrong CA", "CERTIFICATE_VERIFY_FAILED"),
        ("expired", "certificate has expired"),
    ],
)
@asynchronous
async def test_the_handshake_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str, line: str
) -> None:
    """gRPC itself ends these connections, and writes the line: no call of theirs reaches a handler."""
    pki = Pki(tmp_path)
    own = load(pki.tls("operator", "ada").folder)
    stranger = load(Pki(tmp_path / "other").tls("operator", "ada").folder)
    expired = load(pki.expired("operator", "ada").folder)
    credentials = {
        "no certificate": grpc.ssl_channel_credentials(own.ca),
        "wrong CA": grpc.ssl_channel_credentials(own.ca, stranger.key, stranger.cert),
        "expired": grpc.ssl_channel_credentials(own.ca, expired.key, expired.cert),
    }
    async with servers(tmp_path, pki) as made:
        for address in (made.coordinator_address, made.aggregator_address):
            if case == "plain text":
                channel = aio.insecure_channel(address)
            else:
                channel = aio.secure_channel(address, credentials[case])
            async with channel:
                check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                assert ("UNAVAILABLE", "") == await refusal(check)
        said: list[str] = []

        def logged() -> bool:
            said.append(capfd.readouterr().err)
            return "".join(said).count(line) >= 2

        await until(logged, f"two lines with {line}", seconds=10)


@asynchronous
async def test_a_server_of_another_authority_is_not_talked_to(tmp_path: Path) -> None:
    pki, other = Pki(tmp_path), Pki(tmp_path / "other")
    async with servers(tmp_path, pki) as made:
        code, _ = await refusal(list_runs(made.coordinator_address, other.tls("operator", "ada")))
        assert "UNAVAILABLE" == code


@asynchronous
async def test_an_agent_cannot_stand_in_for_a_server(tmp_path: Path) -> None:
    """Its certificate names no host and is not meant for servers."""
    pki = Pki(tmp_path)
    own = load(pki.tls("agent", "a").folder)
    server = aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(own.key, own.cert)]))
    await server.start()
    code, _ = await refusal(list_runs(f"127.0.0.1:{port}", pki.tls("operator", "ada")))
    assert "UNAVAILABLE" == code
    await server.stop(0)


@asynchronous
async def test_a_revoked_certificate_is_refused_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pki = Pki(tmp_path)
    tls = pki.tls("viewer", "eve")
    async with servers(tmp_path, pki) as made, connect(made.coordinator_address, tls) as channel:
        stub = CoordinatorServiceStub(channel)
        await stub.ListRuns(LIST)
        pki.authority.revoke(Identity("viewer", "eve"))
        assert ("UNAUTHENTICATED", "revoked") == await refusal(stub.ListRuns(LIST))
        assert ("UNAUTHENTICATED", "revoked") == await refusal(list_runs(made.coordinator_address, tls))
        assert 2 == await made.refused("revoked")
    assert 2 == caplog.text.count("refused: the certificate of viewer 'eve' is revoked")


@asynchronous
async def test_a_certificate_that_expires_on_an_open_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pki = Pki(tmp_path)
    tls = pki.tls("viewer", "eve", days=3 / 86400)
    async with servers(tmp_path, pki) as made, connect(made.coordinator_address, tls) as channel:
        stub = CoordinatorServiceStub(channel)
        await stub.ListRuns(LIST)
        facts = load(tls.folder).facts
        await until(lambda: guard.utc_now() >= facts.not_after, "the certificate to expire")
        assert ("UNAUTHENTICATED", "expired") == await refusal(stub.ListRuns(LIST))
        assert 1 == await made.refused("expired")
    assert "has expired" in caplog.text


@asynchronous
async def test_a_viewer_cannot_submit_or_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pki = Pki(tmp_path)
    tls = pki.tls("viewer", "eve")
    async with servers(tmp_path, pki) as made:
        async with connect(made.coordinator_address, tls) as channel:
            stub = CoordinatorServiceStub(channel)
            create = stub.CreateRun(coordinator_pb2.CreateRunRequest(run="x"))
            assert ("PERMISSION_DENIED", "role") == await refusal(create)
            control = stub.ControlRun(coordinator_pb2.ControlRunRequest(run="x"))
            assert ("PERMISSION_DENIED", "role") == await refusal(control)
        async with connect(made.aggregator_address, tls) as channel:
            bulk = AggregatorServiceStub(channel)
            assert ("PERMISSION_DENIED", "role") == await refusal(bulk.CreateModel(iter([])))
            model = bulk.GetModel(aggregator_pb2.GetModelRequest(run="x")).read()
            assert ("PERMISSION_DENIED", "role") == await refusal(model)
        assert 2 == await made.refused("role")
    assert "refused: viewer 'eve' may not call CreateRun" in caplog.text
    record = next(r for r in caplog.records if "CreateRun" in r.getMessage())
    assert (logging.WARNING, "role", "eve") == (record.levelno, record.reason, record.client)


@asynchronous
async def test_an_agent_cannot_speak_for_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pki = Pki(tmp_path)
    tls = pki.tls("agent", "mallory")
    async with servers(tmp_path, pki) as made:
        async with connect(made.coordinator_address, tls) as channel:
            call = CoordinatorServiceStub(channel).Session()
            hello = coordinator_pb2.Hello(client="alice")
            await call.write(coordinator_pb2.SessionRequest(hello=hello))
            assert ("PERMISSION_DENIED", "client") == await refusal(call.read())
        assert 0 == made.coordinator.sessions.num_sessions
        async with connect(made.aggregator_address, tls) as channel:
            upload = AggregatorServiceStub(channel).PutUpdate()
            header = aggregator_pb2.UpdateHeader(run="x", report=task_pb2.Report(client="alice"))
            await upload.write(aggregator_pb2.PutUpdateRequest(header=header))
            assert ("PERMISSION_DENIED", "client") == await refusal(upload.read())
        assert 1 == await made.refused("client")
    assert 2 == caplog.text.count("agent 'mallory', which cannot speak for 'alice'")


@asynchronous
async def test_an_agent_cannot_run_rounds_or_read_status(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    tls = pki.tls("agent", "a")
    async with servers(tmp_path, pki) as made:
        code = await refusal(list_runs(made.coordinator_address, tls))
        assert ("PERMISSION_DENIED", "role") == code
        async with connect(made.aggregator_address, tls) as channel:
            stub = AggregatorServiceStub(channel)
            for call in (
                stub.OpenRound(aggregator_pb2.OpenRoundRequest()),
                stub.SealRound(aggregator_pb2.SealRoundRequest()).read(),
                stub.CommitRound(aggregator_pb2.CommitRoundRequest()),
                stub.KeepVersion(aggregator_pb2.KeepVersionRequest()),
            ):
                assert ("PERMISSION_DENIED", "role") == await refusal(call)


async def denied(made: Servers, tls: Tls) -> set[str]:
    """The calls that end with PERMISSION_DENIED, of those that only one role may make."""
    found = set()
    async with connect(made.coordinator_address, tls) as main, connect(made.aggregator_address, tls) as bulk:
        coordinator, aggregator = CoordinatorServiceStub(main), AggregatorServiceStub(bulk)
        for name, call in {
            "Session": coordinator.Session().read(),
            "CreateRun": coordinator.CreateRun(coordinator_pb2.CreateRunRequest(run="x")),
            "ControlRun": coordinator.ControlRun(coordinator_pb2.ControlRunRequest(run="x")),
            "DeleteRuns": coordinator.DeleteRuns(coordinator_pb2.DeleteRunsRequest(older_than_seconds=-1)),
            "PutUpdate": aggregator.PutUpdate().read(),
            "CreateModel": aggregator.CreateModel(iter([])),
            "OpenRound": aggregator.OpenRound(aggregator_pb2.OpenRoundRequest()),
            "SealRound": aggregator.SealRound(aggregator_pb2.SealRoundRequest()).read(),
            "EndRun": aggregator.EndRun(aggregator_pb2.EndRunRequest()),
            "DeleteRun": aggregator.DeleteRun(aggregator_pb2.DeleteRunRequest()),
            "CommitRound": aggregator.CommitRound(aggregator_pb2.CommitRoundRequest()),
            "KeepVersion": aggregator.KeepVersion(aggregator_pb2.KeepVersionRequest()),
        }.items():
            code, reason = await refusal(call)
            if (code, reason) == ("PERMISSION_DENIED", "role"):
                found.add(name)
    return found


@asynchronous
async def test_an_operator_cannot_run_rounds_or_take_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_messages, "FIRST_SECONDS", 0.2)
    pki = Pki(tmp_path)
    async with servers(tmp_path, pki) as made:
        refused = await denied(made, pki.tls("operator", "ada"))
    rounds = {"OpenRound", "SealRound", "CommitRound", "EndRun", "DeleteRun", "KeepVersion"}
    assert {"Session", "PutUpdate", *rounds} == refused


@asynchronous
async def test_a_service_cannot_submit_or_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_messages, "FIRST_SECONDS", 0.2)
    pki = Pki(tmp_path)
    async with servers(tmp_path, pki) as made:
        refused = await denied(made, pki.tls("service", "shard"))
    assert {"Session", "CreateRun", "ControlRun", "DeleteRuns", "PutUpdate", "CreateModel"} == refused


@asynchronous
async def test_an_open_stream_ends_when_its_certificate_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "RECHECK_SECONDS", 0.05)
    pki = Pki(tmp_path)
    async with servers(tmp_path, pki) as made:
        async with connect(made.coordinator_address, pki.tls("agent", "a")) as channel:
            call = CoordinatorServiceStub(channel).Session()
            await call.write(
                coordinator_pb2.SessionRequest(hello=coordinator_pb2.Hello(client="a", protocol=PROTOCOL))
            )
            assert "welcome" == (await call.read()).WhichOneof("kind")
            assert 1 == made.coordinator.sessions.num_sessions
            pki.authority.revoke(Identity("agent", "a"))
            assert ("UNAUTHENTICATED", "revoked") == await refusal(call.read())
        await until(lambda: made.coordinator.sessions.num_sessions == 0, "the session to be gone")


@asynchronous
async def test_a_server_shows_a_renewed_certificate_without_restart(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    async with servers(tmp_path, pki) as made:
        await list_runs(made.coordinator_address, pki.tls("operator", "ada"))
        before = load(Path(made.coordinator.config.tls.dir)).facts
        pki.authority.revoke(before.identity)
        pki.authority.issue(Path(made.coordinator.config.tls.dir), before.identity, ["localhost"])
        code, _ = await refusal(list_runs(made.coordinator_address, pki.tls("operator", "bob")))
        assert "UNAVAILABLE" == code, "the new certificate is not for 127.0.0.1"
        by_name = made.coordinator_address.replace("127.0.0.1", "localhost")
        await list_runs(by_name, pki.tls("operator", "bob"))


def test_every_call_has_its_rule() -> None:
    for service in (coordinator_pb2.DESCRIPTOR, aggregator_pb2.DESCRIPTOR):
        for name, found in service.services_by_name.items():
            for method in found.methods:
                assert RULES[f"/fedel.v1.{name}/{method.name}"], method.name
    assert all("viewer" not in roles for call, roles in RULES.items() if "AggregatorService/" in call)
    assert not any("Enrol" in call.rpartition("/")[2] for call in RULES)
