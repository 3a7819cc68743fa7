"""A TCP proxy that a test owns: it counts bytes, holds an upload, cuts it, or drops the answer."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

_PIECE_BYTES = 64 * 1024


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

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
            await self._pass_on(link, writer, data)

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
            writer.write(data)
            with suppress(ConnectionError):
                await writer.drain()


@dataclass
class _Link:
    """One connection."""

    snare: Snare | None = None
    sent: int = 0
    """Bytes passed up since that snare was set."""
    muted: bool = False
