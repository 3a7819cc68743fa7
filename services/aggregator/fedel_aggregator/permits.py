"""Who may send now: a few permits, one stream a client, and threads that are never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from grpc import aio

from fedel.errors import UpdateRefused

T = TypeVar("T")
BATCH_BYTES = 1024 * 1024
"""Bytes of a payload that are written at once."""
BATCH_PIECES = 512
"""Pieces that are written at once; systems take no more than 1,024."""


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
    """One client's upload; a later one of the same client takes its place."""

    def __init__(self) -> None:
        self.superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()

    def supersede(self) -> None:
        if not self.superseded.done():
            self.superseded.set_result(None)

    async def wait(self, hoped: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Wait until it is done, or so long; refused once another stream has taken over."""
        await asyncio.wait({hoped, self.superseded}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self.superseded.done() and not hoped.done():
            raise UpdateRefused("superseded", "the client began this upload again on another stream")


class Uploads:
    """Permits to send. Waiting for one costs neither a thread nor memory."""

    def __init__(self, max_uploads: int) -> None:
        self._permits = asyncio.Semaphore(max_uploads)
        self.num_sending, self.num_waiting = 0, 0
        self._streams: dict[tuple[str, str], list[Stream]] = {}

    @asynccontextmanager
    async def turn(self, run: str, client: str) -> AsyncIterator[Stream]:
        """The only stream of this client: a client that comes again does so because its last stream died."""
        mine, key = Stream(), (run, client)
        streams = self._streams.setdefault(key, [])
        for stream in streams:
            stream.supersede()
        streams.append(mine)
        try:
            while streams[0] is not mine:
                await streams[0].ended.wait()
            yield mine
        finally:
            mine.ended.set()
            streams.remove(mine)
            if not streams:
                del self._streams[key]

    @asynccontextmanager
    async def permit(self, stream: Stream) -> AsyncIterator[None]:
        asked = asyncio.ensure_future(self._permits.acquire())
        try:
            self.num_waiting += 1
            try:
                await stream.wait(asked)
            finally:
                self.num_waiting -= 1
            self.num_sending += 1
            try:
                yield
            finally:
                self.num_sending -= 1
        finally:
            if asked.done():
                self._permits.release()
            else:
                asked.cancel()


class Sink(Protocol):
    """Where a payload goes."""

    received: int
    """Bytes that are there."""

    @property
    def num_bytes(self) -> int:
        """Bytes that were announced."""
        ...

    def append(self, pieces: Sequence[bytes | memoryview]) -> None: ...


async def receive(context: Any, sink: Sink, stream: Stream, idle_seconds: float) -> None:
    """Take a payload to its last byte; refused if it stands still, or is not what was announced."""
    receiver = _Receiver(context, sink)
    taking = asyncio.ensure_future(receiver.take())
    try:
        seen = -1
        while not taking.done():
            if seen == receiver.num_messages:
                raise _idle(idle_seconds)
            seen = receiver.num_messages
            await stream.wait(taking, idle_seconds)
        taking.result()
    finally:
        taking.cancel()
        await asyncio.wait({taking})


class _Receiver:
    """Puts the pieces of a payload into its sink, several at a time: handing over to a thread has its price."""

    def __init__(self, context: Any, sink: Sink) -> None:
        self._context, self._sink = context, sink
        self._pieces: list[bytes | memoryview] = []
        self._waiting_bytes = 0
        self.num_messages = 0

    async def take(self) -> None:
        try:
            while (message := await self._context.read()) is not aio.EOF:
                self.num_messages += 1
                await self._put(message.chunk.offset, message.chunk.data)
        finally:
            # What came before the stream broke need not be sent again.
            await self._flush()
        if self._sink.received < self._sink.num_bytes:
            raise UpdateRefused(
                "size", f"the payload ended after {self._sink.received} of {self._sink.num_bytes} bytes"
            )

    async def _put(self, offset: int, data: bytes | memoryview) -> None:
        expected = self._sink.received + self._waiting_bytes
        if offset != expected or not data or expected + len(data) > self._sink.num_bytes:
            await drain(self._context)
            raise UpdateRefused(
                "size",
                f"{len(data)} bytes at {offset} came where byte {expected} of {self._sink.num_bytes} was next",
            )
        self._pieces.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= BATCH_BYTES or len(self._pieces) >= BATCH_PIECES:
            await self._flush()

    async def _flush(self) -> None:
        pieces, self._pieces, self._waiting_bytes = self._pieces, [], 0
        if pieces:
            await in_thread(self._sink.append, pieces)


async def drain(context: Any) -> None:
    """Let a caller send to its end: one whose stream is cut under a write would not hear why."""
    while await context.read() is not aio.EOF:
        pass
