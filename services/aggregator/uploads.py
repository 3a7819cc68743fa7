"""Who may send now: a few permits, one stream a client, and threads that are never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from grpc import aio

from fedel.errors import UpdateRefused
from fedel.v1.model_pb2 import Chunk

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run file or array work in a thread, to its end even if the caller is cancelled: nothing is written behind
    the back of whoever comes next."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class _Stream:
    """One client's upload."""

    def __init__(self) -> None:
        self.superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()


class Uploads:
    """Permits to send. Waiting for one costs neither a thread nor memory."""

    def __init__(self, max_uploads: int, idle_seconds: float) -> None:
        self._permits = asyncio.Semaphore(max_uploads)
        self._idle_seconds = idle_seconds
        self._streams: dict[tuple[str, str], _Stream] = {}

    @asynccontextmanager
    async def turn(self, run: str, client: str) -> AsyncIterator[_Stream]:
        """The only stream of this client: a client that comes again does so because its last stream died."""
        mine, key = _Stream(), (run, client)
        last = self._streams.get(key)
        self._streams[key] = mine
        try:
            if last is not None:
                if not last.superseded.done():
                    last.superseded.set_result(None)
                await last.ended.wait()
            yield mine
        finally:
            mine.ended.set()
            if self._streams.get(key) is mine:
                del self._streams[key]

    @asynccontextmanager
    async def permit(self, stream: _Stream) -> AsyncIterator[None]:
        await self._wait(stream, self._permits.acquire(), None)
        try:
            yield
        finally:
            self._permits.release()

    async def read(self, stream: _Stream, context: Any) -> Any:
        """The next message, or ``grpc.aio.EOF``; refused if it does not come in time."""
        return await self._wait(stream, context.read(), self._idle_seconds)

    async def _wait(self, stream: _Stream, something: Awaitable[T], timeout: float | None) -> T:
        task = asyncio.ensure_future(something)
        try:
            await asyncio.wait(
                {task, stream.superseded}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
            if stream.superseded.done():
                raise UpdateRefused("superseded", "the client began this upload again on another stream")
            raise UpdateRefused(
                "idle", f"nothing came for {timeout:g} seconds: send it again, what is here is kept"
            )
        finally:
            task.cancel()


class Sink(Protocol):
    """Where a payload goes."""

    received: int

    @property
    def num_bytes(self) -> int: ...

    def append(self, data: bytes) -> None: ...


async def receive(read: Callable[[], Awaitable[Any]], sink: Sink) -> None:
    """Take a payload to its last byte, in order and without gaps, until the caller says that it is through."""
    while (message := await read()) is not aio.EOF:
        chunk: Chunk = message.chunk
        if chunk.offset != sink.received or not chunk.data:
            raise UpdateRefused(
                "size", f"a piece of {len(chunk.data)} bytes at {chunk.offset} came where {sink.received} was next"
            )
        if sink.received + len(chunk.data) > sink.num_bytes:
            raise UpdateRefused("size", f"more bytes came than the {sink.num_bytes} that were announced")
        await in_thread(sink.append, chunk.data)
    if sink.received < sink.num_bytes:
        raise UpdateRefused("size", f"the payload ended after {sink.received} of {sink.num_bytes} bytes")
