"""What the proxy does to a link."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fedel.chaos.proxy import Proxy

DATA = bytes(range(256)) * 64


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def echo() -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, Proxy(f"{host}:{port}") as proxy:
        yield proxy


async def ask(proxy: Proxy) -> bytes:
    host, _, port = proxy.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(DATA)
        return await asyncio.wait_for(reader.readexactly(len(DATA)), 10)
    finally:
        writer.transport.abort()


def test_passes_everything_on() -> None:
    async def scenario() -> None:
        async with echo() as proxy:
            assert DATA == await ask(proxy)

    asyncio.run(scenario())


def test_damages_one_bit_once() -> None:
    async def scenario() -> None:
        async with echo() as proxy:
            proxy.damage = True
            answer = await ask(proxy)
            flipped = [one ^ other for one, other in zip(DATA, answer, strict=True)]
            assert [4] == [bits for bits in flipped if bits]
            assert DATA == await ask(proxy)

    asyncio.run(scenario())


@pytest.mark.parametrize("setting", ["delay_seconds", "bytes_per_second"])
def test_slows_down_until_mended(setting: str) -> None:
    async def scenario() -> None:
        async with echo() as proxy:
            setattr(proxy, setting, 0.1 if setting == "delay_seconds" else len(DATA) / 0.1)
            begin = time.monotonic()
            assert DATA == await ask(proxy)
            assert time.monotonic() - begin >= 0.2
            proxy.mend()
            assert 0 == getattr(proxy, setting)

    asyncio.run(scenario())


def test_cut_link_comes_back_when_mended() -> None:
    async def scenario() -> None:
        async with echo() as proxy:
            proxy.cut()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await ask(proxy)
            proxy.mend()
            assert DATA == await ask(proxy)

    asyncio.run(scenario())


def test_held_bytes_arrive_when_mended() -> None:
    async def scenario() -> None:
        async with echo() as proxy:
            proxy.hold()
            answer = asyncio.ensure_future(ask(proxy))
            done, _ = await asyncio.wait({answer}, timeout=0.2)
            assert not done
            proxy.mend()
            assert DATA == await answer

    asyncio.run(scenario())
