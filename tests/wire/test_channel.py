"""A server that comes back at another address is found again soon, although the old address only swallows."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fedel.security.tls import Tls
from fedel.wire.channel import Dialer
from fedel.wire.retry import Backoff, retrying

NAME = "shard.test"
OLD, NEW = "127.0.0.2", "127.0.0.3"
FOUND_SECONDS = 5.0


class Names(asyncio.DatagramProtocol):
    """A name server that knows one name: it answers every question for an IPv4 address with ``address``."""

    address = OLD

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        end = data.index(b"\0", 12) + 5
        (kind,) = struct.unpack("!H", data[end - 4 : end - 2])
        answers = 1 if kind == 1 else 0
        reply = data[:2] + struct.pack("!5H", 0x8580, 1, answers, 0, 0) + data[12:end]
        if answers:
            reply += struct.pack("!HHHIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(self.address)
        self.transport.sendto(reply, sender)  # type: ignore[attr-defined]


@asynccontextmanager
async def name_server() -> AsyncIterator[tuple[Names, int]]:
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(Names, local_addr=("127.0.0.1", 0))
    yield names, transport.get_extra_info("sockname")[1]
    transport.close()


async def serve(address: str, port: int) -> tuple[aio.Server, int]:
    server = aio.server()
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"{address}:{port}")
    await server.start()
    return server, port


async def ask(dialer: Dialer, address: str) -> None:
    stub = health_pb2_grpc.HealthStub(dialer.channel(address))
    await retrying(lambda: stub.Check(health_pb2.HealthCheckRequest()), backoff=Backoff(2.0))


async def seconds_to_find_it() -> float:
    async with name_server() as (names, name_port):
        server, port = await serve(OLD, 0)
        dialer = Dialer(Tls(insecure_anywhere=True), near=True)
        address = f"dns://127.0.0.1:{name_port}/{NAME}:{port}"
        await ask(dialer, address)
        await server.stop(0)
        # What is left of a pod's address: connections neither succeed nor fail, since nobody accepts them.
        silent = socket.create_server((OLD, port))
        waiting = asyncio.ensure_future(ask(dialer, address))
        await asyncio.wait([waiting], timeout=1.5)
        assert not waiting.done()
        names.address = NEW
        server, _ = await serve(NEW, port)
        began = time.monotonic()
        await waiting
        took = time.monotonic() - began
        silent.close()
        await server.stop(0)
        await dialer.close()
        return took


def test_a_server_that_moved_is_found_again_within_seconds() -> None:
    assert asyncio.run(asyncio.wait_for(seconds_to_find_it(), 60)) < FOUND_SECONDS


async def peers(num_tasks: int) -> list[tuple[str, str]]:
    """Which connections a server saw, of two calls of each task."""

    async def who(_request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        return context.peer().encode()

    server = aio.server()
    handlers = {"Who": grpc.unary_unary_rpc_method_handler(who)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    seen = []
    for _ in range(num_tasks):
        async with Dialer() as dialer:
            first: bytes = await dialer.channel(address).unary_unary("/test/Who")(b"")
            second: bytes = await dialer.channel(address).unary_unary("/test/Who")(b"")
            channel = dialer.channel(address)
        assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        seen.append((first.decode(), second.decode()))
    await server.stop(0)
    return seen


def test_connections_end_with_their_dialer() -> None:
    seen = asyncio.run(asyncio.wait_for(peers(3), 60))
    assert all(first == second for first, second in seen)
    assert 3 == len(dict(seen))


SERVE = """
import asyncio
from fedel.wire.channel import SERVER_OPTIONS
from grpc import aio

async def serve():
    server = aio.server(options=SERVER_OPTIONS)
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await server.stop(None)

asyncio.run(serve())
"""


def test_grpc_knows_the_setting_that_takes_its_event_engine_out_of_servers():
    """A version of gRPC that does not writes a line to the log of every server."""
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, check=True)
    assert "" == done.stderr
