"""Who may send now: a few permits, one stream a client, and threads that are never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
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
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        task.exception()
        raise


async def in_time(something: Awaitable[T], seconds: float) -> T:
    """Refuse a caller that lets a stream stand still."""
    try:
        return await asyncio.wait_for(something, seconds)
    except asyncio.TimeoutError:
        raise _idle(seconds) from None


def _idle(seconds: float) -> UpdateRefused:
    return UpdateRefused("idle", f"the stream stood still for {seconds:g} seconds: try again")


class Stream:
    """One client's upload."""

    def __init__(self) -> None:
        self.superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()


class Uploads:
    """Permits to send. Waiting for one costs neither a thread nor memory."""

    def __init__(self, max_uploads: int, idle_seconds: float) -> None:
        self._permits = asyncio.Semaphore(max_uploads)
        self._idle_seconds = idle_seconds
        self._streams: dict[tuple[str, str], Stream] = {}

    @asynccontextmanager
    async def turn(self, run: str, client: str) -> AsyncIterator[Stream]:
        """The only stream of this client: a client that comes again does so because its last stream died."""
        mine, key = Stream(), (run, client)
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
    async def permit(self, stream: Stream) -> AsyncIterator[None]:
        asked = asyncio.ensure_future(self._permits.acquire())
        try:
            await self._wait(stream, asked, None)
            yield
        finally:
            if asked.done():
                self._permits.release()
            else:
                asked.cancel()

    async def read(self, stream: Stream, context: Any) -> Any:
        """The next message, or ``grpc.aio.EOF``; refused if it does not come in time."""
        message = asyncio.ensure_future(context.read())
        try:
            await self._wait(stream, message, self._idle_seconds)
            return message.result()
        finally:
            message.cancel()

    async def _wait(self, stream: Stream, hoped: asyncio.Future[Any], seconds: float | None) -> None:
        await asyncio.wait({hoped, stream.superseded}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if hoped.done():
            return
        if stream.superseded.done():
            raise UpdateRefused("superseded", "the client began this upload again on another stream")
        raise _idle(seconds or 0.0)


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
        if problem := _problem(chunk, sink):
            await drain(read)
            raise UpdateRefused("size", problem)
        await in_thread(sink.append, chunk.data)
    if sink.received < sink.num_bytes:
        raise UpdateRefused("size", f"the payload ended after {sink.received} of {sink.num_bytes} bytes")


def _problem(chunk: Chunk, sink: Sink) -> str:
    if chunk.offset != sink.received or not chunk.data:
        return f"a piece of {len(chunk.data)} bytes at {chunk.offset} came where byte {sink.received} was next"
    if sink.received + len(chunk.data) > sink.num_bytes:
        return f"more bytes came than the {sink.num_bytes} that were announced"
    return ""


async def drain(read: Callable[[], Awaitable[Any]]) -> None:
    """Let a caller send to its end: one whose stream is cut under a write would not hear why."""
    with suppress(UpdateRefused):
        while await read() is not aio.EOF:
            pass
