"""The aggregator's side of its streams: headers and payloads in, models out, callers that fall silent.

``fedel.wire.streams`` is the caller's side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fedel_services.threads import in_thread
from grpc import aio

from fedel.errors import FedelError, UpdateRefused
from fedel.roles.gate import objection_to_wanted
from fedel.strategies.server_steps import AVERAGE
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1 import model_pb2
from fedel.wire.payload import CHUNK_BYTES
from fedel.wire.views import UploadPiece, model_piece
from fedel_aggregator.limits import Pace, idle
from fedel_aggregator.permits import ClientStream
from fedel_aggregator.run import ShardRun
from fedel_aggregator.shared_reads import SharedReads
from fedel_aggregator.tensor_file import Place, TensorFile

T = TypeVar("T")
BATCH_BYTES = 2 * 1024 * 1024
"""Bytes of a payload that are written at once: each hand-over to a thread has its price."""
REPORTS_BYTES = 1024 * 1024
"""Size of a message with many reports; gRPC takes at most four times that."""
BATCH_PIECES = 512
"""Pieces that are written at once; the system takes at most 1,024."""
READ_PIECES = 2
"""Pieces of a model that are read at once."""


async def in_time(work: Awaitable[T], seconds: float) -> T:
    """Refuse a caller that keeps a stream idle for longer."""
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise idle(seconds) from None


def in_batches(sealed: pb.SealRoundResponse) -> Iterator[pb.SealRoundResponse]:
    """The same reports in messages of about ``REPORTS_BYTES``: one of a thousand clients would be too large."""
    batch, size = pb.SealRoundResponse(), 0
    for report in sealed.reports:
        if size > REPORTS_BYTES:
            yield batch
            batch, size = pb.SealRoundResponse(), 0
        batch.reports.append(report)
        size += report.ByteSize()
    yield batch


async def read_header(context: Any, idle_seconds: float) -> Any:
    """The header with which every stream of a payload begins."""
    first = await in_time(context.read(), idle_seconds)
    if first is aio.EOF or isinstance(first, UploadPiece) or first.WhichOneof("kind") != "header":
        raise UpdateRefused("header", "the stream does not begin with its header: send that first")
    return first.header


class Sink(Protocol):
    """Where a payload goes."""

    received: int
    """Bytes that are there."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the header announced."""
        ...

    def append(self, pieces: Sequence[bytes | memoryview]) -> None: ...


async def paced(work: Coroutine[Any, Any, T], pace: Pace, stream: ClientStream | None = None) -> T:
    """Do work that moves bytes; refused if it is idle, too slow, or superseded."""
    task = asyncio.ensure_future(work)
    try:
        return await _watch(task, pace, stream or ClientStream())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # or its error ends up in the log


async def _watch(task: asyncio.Future[T], pace: Pace, stream: ClientStream) -> T:
    pace.start()
    while not task.done():
        await stream.wait_for(task, pace.seconds)
        if not task.done():
            pace.check()
    return task.result()


async def receive_payload(context: Any, sink: Sink, pace: Pace, stream: ClientStream | None = None) -> None:
    """Write a payload into its sink, to the last byte; refused if it is idle or not what was announced.

    What came in before it broke stays in the sink.
    """
    await paced(_copy(context, sink, pace), pace, stream)


async def _copy(context: Any, sink: Sink, pace: Pace) -> None:
    pieces: list[bytes | memoryview] = []
    num_bytes = 0
    try:
        while (message := await context.read()) is not aio.EOF:
            chunk, expected = message.chunk, sink.received + num_bytes
            if chunk.offset != expected or not chunk.data or expected + len(chunk.data) > sink.num_bytes:
                await drain(context)
                raise UpdateRefused(
                    "size",
                    f"{len(chunk.data)} bytes at {chunk.offset} came where byte {expected} of {sink.num_bytes}"
                    " was next",
                )
            pace.moved(len(chunk.data))
            pieces.append(chunk.data)
            num_bytes += len(chunk.data)
            if num_bytes >= BATCH_BYTES or len(pieces) >= BATCH_PIECES:
                batch, pieces, num_bytes = pieces, [], 0
                await in_thread(sink.append, batch)
    finally:
        # What came before the stream broke need not be sent again.
        if pieces:
            await in_thread(sink.append, pieces)
    if sink.received < sink.num_bytes:
        raise UpdateRefused("size", f"the payload ended after {sink.received} of {sink.num_bytes} bytes")


async def drain(context: Any) -> None:
    """Let a caller send to its end: if its stream were cut during a write, it would not learn why."""
    while await context.read() is not aio.EOF:
        pass


@asynccontextmanager
async def heard_out(context: Any, idle_seconds: float) -> AsyncIterator[None]:
    """Refuse a caller only after it has sent all, so that it learns why."""
    try:
        yield
    except (FedelError, OSError):
        await in_time(drain(context), idle_seconds)
        raise


async def send_model(
    context: Any,
    run: ShardRun,
    request: pb.GetModelRequest,
    pace: Pace,
    reads: SharedReads,
    make_room: Callable[[], None],
) -> int:
    """Send a version, or what the caller needs of it and does not hold; returns the bytes of its payload.

    ``reads`` are shared with others that fetch a model at the same time. ``make_room`` is called when a caller
    does not read: others need not wait for it.
    """
    version = run.version if request.version < 0 else request.version
    found = await in_thread(_find, run, request, version)
    with found.file:
        content = pb.ModelContent(version=version, tensors=found.manifest())
        sending = asyncio.ensure_future(_send(context, content, found, pace, reads))
        try:
            return await _watch(sending, pace, ClientStream())
        except UpdateRefused:
            make_room()
            # A message that is being written cannot be taken back, and the status comes after it.
            pace.stopped = True
            await asyncio.wait({sending})
            raise
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


@dataclass(frozen=True)
class _Found:
    """What is sent, and where it lies."""

    file: TensorFile
    stored: Mapping[str, str]
    """By the name of a tensor, its name in the file."""
    crc32: Mapping[str, int]
    """By the name in the file."""

    def manifest(self) -> Iterator[model_pb2.TensorManifest]:
        for name, stored in self.stored.items():
            yield _entry(name, self.file.places[stored], self.crc32[stored])


def _find(run: ShardRun, request: pb.GetModelRequest, version: int) -> _Found:
    meta, versions = run.meta(version), run.versions
    held = _held(run, request)
    if not request.average:
        versions.verify(meta)
        # A caller that is ahead of us holds another history: it gets everything.
        names = [name for name, has in held.items() if has > meta.version or meta.changed[name] > has]
        return _Found(versions.open(meta.version), {name: name for name in names}, meta.crc32)
    stored = {name: AVERAGE + name for name in held if AVERAGE + name in meta.state_crc32}
    file = versions.open_state(meta) if stored else versions.open(meta.version)
    try:
        for name in stored.values():
            file.verify(name, meta.state_crc32[name])
    except BaseException:
        file.close()
        raise
    return _Found(file, stored, meta.state_crc32)


def _held(run: ShardRun, request: pb.GetModelRequest) -> dict[str, int]:
    """The tensors that the caller needs, in forward order, and the version that it holds of each."""
    if objection := objection_to_wanted(request.tensors, request.have_versions, run.whole_spec):
        raise UpdateRefused("unknown_tensor", f"the request for a model is refused: {objection}")
    mine = [t.name for t in run.spec.tensors]
    if not request.tensors:
        return dict.fromkeys(mine, request.have_version)
    named = [run.whole_spec.tensors[place].name for place in request.tensors]
    if other := set(named) - set(mine):
        raise UpdateRefused("unknown_tensor", f"tensor '{min(other)}' is not one of this aggregator's")
    return dict(zip(named, request.have_versions, strict=True))


async def _send(context: Any, content: pb.ModelContent, found: _Found, pace: Pace, reads: SharedReads) -> int:
    await context.write(pb.GetModelResponse(content=content))
    sent, file, pieces = 0, found.file, list(_pieces(found.file, list(found.stored.values())))
    for start in range(0, len(pieces), READ_PIECES):
        batch = tuple(pieces[start : start + READ_PIECES])
        messages = await reads.get((file.identity, sent, batch), partial(_read, file, batch, sent))
        for message, (_, num_bytes) in zip(messages, batch, strict=True):
            if pace.stopped:
                return sent
            await context.write(message)
            pace.moved(num_bytes)
            sent += num_bytes
    return sent


def _entry(name: str, place: Place, crc32: int) -> model_pb2.TensorManifest:
    return model_pb2.TensorManifest(
        name=name,
        dtype=model_pb2.DTYPE_FLOAT32,
        shape=place.shape,
        num_bytes=place.num_bytes,
        crc32=crc32,
    )


def _pieces(file: TensorFile, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Offset and size of each piece to send; tensors that are side by side in the file share pieces."""
    spans: list[list[int]] = []
    for place in (file.places[name] for name in names):
        if spans and spans[-1][1] == place.offset:
            spans[-1][1] += place.num_bytes
        else:
            spans.append([place.offset, place.offset + place.num_bytes])
    for begin, end in spans:
        for offset in range(begin, end, CHUNK_BYTES):
            yield offset, min(CHUNK_BYTES, end - offset)


def _read(file: TensorFile, pieces: Sequence[tuple[int, int]], position: int) -> list[bytes]:
    """Messages with these pieces of a file; ``position`` is that of the first in the payload."""
    messages = []
    for offset, num_bytes in pieces:
        messages.append(model_piece(position, file.read(offset, num_bytes)))
        position += num_bytes
    return messages
