"""Connections and streams that say nothing are ended."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from fedel_services import first_messages, runtime

from fedel.errors import UpdateRefused
from fedel.security.tls import host_of
from fedel.v1 import coordinator_pb2
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import SERVER_OPTIONS, connect
from fedel.wire.protocol import PROTOCOL
from tests.security.support import Pki, refusal, servers
from tests.services.coordinator.support import asynchronous

STEP_SECONDS = 20.0


def test_servers_look_after_their_connections() -> None:
    limits = dict(SERVER_OPTIONS)
    assert limits["grpc.server_handshake_timeout_ms"] <= 10_000
    assert limits["grpc.keepalive_time_ms"] + limits["grpc.keepalive_timeout_ms"] <= 90_000
    assert limits["grpc.max_connection_idle_ms"] <= 600_000


@pytest.mark.parametrize("handshake", [False, True])
@asynchronous
async def test_a_silent_connection_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handshake: bool
) -> None:
    """Before the handshake, or after it without a word of HTTP/2."""
    options = dict(SERVER_OPTIONS) | {"grpc.server_handshake_timeout_ms": 300}
    monkeypatch.setattr(runtime, "SERVER_OPTIONS", list(options.items()))
    pki = Pki(tmp_path)
    context = ssl.create_default_context(cafile=str(pki.authority.folder / "ca.pem"))
    folder = pki.tls("agent", "a").folder
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.set_alpn_protocols(["h2"])
    async with servers(tmp_path, pki) as made:
        host, port = host_of(made.coordinator_address), int(made.coordinator_address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(host, port, ssl=context if handshake else None)
        try:
            # The server may greet; then it closes, because nobody answers.
            await asyncio.wait_for(reader.read(), STEP_SECONDS)
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.transport.abort()


@asynchronous
async def test_a_session_that_says_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_messages, "FIRST_SECONDS", 0.2)
    pki = Pki(tmp_path)
    tls = pki.tls("agent", "a")
    async with servers(tmp_path, pki) as made, connect(made.coordinator_address, tls) as channel:
        call = CoordinatorServiceStub(channel).Session()
        ended = await asyncio.wait_for(refusal(call.read()), STEP_SECONDS)
        assert ("DEADLINE_EXCEEDED", "idle") == ended
        talking = CoordinatorServiceStub(channel).Session()
        await talking.write(
            coordinator_pb2.SessionRequest(hello=coordinator_pb2.Hello(client="a", protocol=PROTOCOL))
        )
        assert "welcome" == (await talking.read()).WhichOneof("kind")
        await asyncio.sleep(0.3)
        assert not talking.done(), "later it may be silent for longer"


@asynchronous
async def test_every_message_can_have_its_time() -> None:
    async def two_then_silence() -> object:
        yield 1
        yield 2
        await asyncio.sleep(STEP_SECONDS)

    found = []

    async def read() -> None:
        async for message in first_messages.Timed(two_then_silence(), STEP_SECONDS, next_seconds=0.05):
            found.append(message)

    with pytest.raises(UpdateRefused, match=r"nothing came for 0\.05 s"):
        await read()
    assert [1, 2] == found
