"""Probes need no certificate, and get only the health of a service."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import pytest
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve
from fedel_services import probe

from fedel.errors import ServiceError
from fedel.security.authority import Authority
from fedel.security.identity import SERVICE, Identity
from fedel.security.tls import Tls
from fedel.v1 import aggregator_pb2, aggregator_pb2_grpc


@pytest.fixture
def free() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def settings(tmp_path: Path, free: str) -> AggregatorConfig:
    authority = Authority.create(tmp_path / "ca")
    authority.issue(tmp_path / "certs", Identity(SERVICE, "aggregator"), ["localhost"])
    return AggregatorConfig(
        listen="127.0.0.1:0", data_dir=tmp_path / "data", health=free, tls=Tls(dir=str(tmp_path / "certs"))
    )


def test_ready_while_it_runs(settings: AggregatorConfig, capsys) -> None:
    async def scenario() -> tuple[int, bool]:
        async with serve(settings) as (address, _):
            return await asyncio.to_thread(probe.main, [settings.health]), await asyncio.to_thread(
                probe.is_ready, address
            )

    assert (0, False) == asyncio.run(scenario())
    assert 1 == probe.main([settings.health])
    assert f"no service is ready at {settings.health}" in capsys.readouterr().err


def test_only_health_is_served(settings: AggregatorConfig) -> None:
    async def scenario() -> grpc.StatusCode:
        async with serve(settings), grpc.aio.insecure_channel(settings.health) as channel:
            stub = aggregator_pb2_grpc.AggregatorServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.KeepVersion(aggregator_pb2.KeepVersionRequest(run="x"))
            return refused.value.code()

    assert grpc.StatusCode.UNIMPLEMENTED == asyncio.run(scenario())


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_garbage_does_not_fill_the_log(
    settings: AggregatorConfig, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone who reaches the port can send it."""

    async def ask(channel: grpc.aio.Channel) -> grpc.StatusCode:
        path = f"/grpc.health.v1.Health/{method}"
        call = channel.unary_unary(path) if method == "Check" else channel.unary_stream(path)
        return await call(b"\x0a\xff\xff\xff").code()

    async def scenario() -> set[grpc.StatusCode]:
        async with serve(settings), grpc.aio.insecure_channel(settings.health) as channel:
            return {await ask(channel) for _ in range(60)}

    assert {grpc.StatusCode.INVALID_ARGUMENT} == asyncio.run(scenario())
    assert len(caplog.records) < 40
    assert not [record for record in caplog.records if record.exc_info]


def test_port_in_use(settings: AggregatorConfig) -> None:
    async def start() -> None:
        async with serve(settings):
            pass

    host, _, port = settings.health.rpartition(":")
    with socket.create_server((host, int(port))), pytest.raises(ServiceError, match="health = "):
        asyncio.run(start())
