"""A TCP proxy for drills and tests: it counts, delays, throttles, holds, damages and cuts what passes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

_PIECE_BYTES = 64 * 1024
_DAMAGED_BYTES = 8 * 1024
"""Only pieces of this length are damaged: they carry tensors, which have checksums. In plain text nothing
protects the rest, which on a real network TCP or TLS does."""


@dataclass
class Snare:
    """What happens to the first connection that sends more than ``num_bytes`` after the snare was set."""

    num_bytes: int
    kind: str
    """``hold`` it there until released, ``cut`` it, or ``mute``: pass everything up and nothing down."""
    caught: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """Forwards connections to ``target``, ``host:port``."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._links: set[asyncio.Task[None]] = set()
        self._snare: Snare | None = None
        self.bytes_up = 0
        """Bytes passed on to the target since the last snare was set."""
        self.address = ""
        self.delay_seconds = 0.0
        """How long each piece waits."""
        self.bytes_per_second = 0.0
        """0: as fast as it goes."""
        self.damage = False
        """Flip one bit of the next piece that carries tensors; then this is false again."""
        self._is_cut = False
        self._open = asyncio.Event()
        self._open.set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def set_snare(self, kind: str, num_bytes: int) -> Snare:
        """Set a snare for the next upload that is longer than this."""
        self._snare, self.bytes_up = Snare(num_bytes, kind), 0
        return self._snare

    def cut(self) -> None:
        """End every connection, and take no new one until ``mend``."""
        self._is_cut = True
        for link in self._links:
            link.cancel()

    def hold(self) -> None:
        """Let nothing pass until ``mend``; connections stay open."""
        self._open.clear()

    def mend(self) -> None:
        self.delay_seconds = self.bytes_per_second = 0.0
        self.damage = self._is_cut = False
        self._open.set()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        link = asyncio.ensure_future(self._forward(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        writers = [writer]
        link = _Link()
        try:
            answers, onward = await asyncio.open_connection(host, int(port))
            writers.append(onward)
            pumps = [
                asyncio.ensure_future(self._up(link, reader, onward)),
                asyncio.ensure_future(self._down(link, answers, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # no one listens there now: the connection ends, as without a proxy
        finally:
            for one in writers:
                one.transport.abort()

    async def _weather(self, data: bytes) -> bytes:
        """What becomes of a piece on its way."""
        await self._open.wait()
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        if self.bytes_per_second:
            await asyncio.sleep(len(data) / self.bytes_per_second)
        if self.damage and len(data) >= _DAMAGED_BYTES:
            self.damage = False
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
        return data

    async def _up(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE_BYTES):
            snare = self._snare
            if snare is not link.snare:
                link.snare, link.sent = snare, 0
            if snare is not None and not snare.caught.is_set() and link.sent + len(data) > snare.num_bytes:
                first, data = data[: snare.num_bytes - link.sent], data[snare.num_bytes - link.sent :]
                await self._pass_on(link, writer, first)
                snare.caught.set()
                if snare.kind == "cut":
                    return
                if snare.kind == "hold":
                    await snare.released.wait()
                link.muted = snare.kind == "mute"
            await self._pass_on(link, writer, await self._weather(data))

    async def _pass_on(self, link: _Link, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        link.sent += len(data)
        self.bytes_up += len(data)

    async def _down(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE_BYTES):
            if link.muted and link.snare is not None:
                await link.snare.released.wait()
                return  # the dropped answer stays lost, so the connection ends too
            writer.write(await self._weather(data))
            with suppress(ConnectionError):
                await writer.drain()


@dataclass
class _Link:
    """One connection."""

    snare: Snare | None = None
    sent: int = 0
    """Bytes passed up since that snare was set."""
    muted: bool = False
