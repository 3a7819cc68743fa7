"""A caller's side of the aggregator's streams: fetch a model, bring a first model, send an update.

Each function makes one attempt and lets ``grpc.aio.AioRpcError`` through: whether and when to try again is the
caller's to decide (``fedel.wire.retry`` does it). A repeated ``push_update`` goes on
where the last attempt broke, because the aggregator says what it has.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np
from grpc import aio

from fedel.errors import ServiceError
from fedel.types import Array, ModelSpec, Patch, Report, Tensors
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1 import model_pb2
from fedel.wire.codec import dtype_from_pb, report_to_pb, spec_to_pb
from fedel.wire.payload import Payload, pack

if TYPE_CHECKING:
    from fedel.v1.aggregator_pb2_grpc import AggregatorServiceAsyncStub

    _Download = aio.UnaryStreamCall[pb.GetModelRequest, pb.GetModelResponse]
    _Upload = aio.StreamStreamCall[pb.PutUpdateRequest, pb.PutUpdateResponse]

REASON = "fedel-reason"
"""Trailing metadata of a refused call: the short word that says why."""


class Fetched(NamedTuple):
    """What ``fetch_model`` brought."""

    version: int
    tensors: dict[str, Array]
    """What changed since the version the caller holds: to be laid over it."""
    num_bytes: int


class Pushed(NamedTuple):
    """What became of an update."""

    duplicate: bool
    """It had been there before; it counts once."""
    wait_seconds: float
    """Time spent waiting for leave to send."""
    num_bytes: int
    """Bytes of the payload sent in this attempt."""


def reason_of(error: aio.AioRpcError) -> str:
    """The short word with which the aggregator refused (``late``, ``shape``, ...); empty if it gave none."""
    word = dict(error.trailing_metadata() or ()).get(REASON, "")
    return word.decode() if isinstance(word, bytes) else word


async def fetch_model(
    stub: AggregatorServiceAsyncStub, run: str, version: int = -1, have_version: int = -1
) -> Fetched:
    """A version of the model (-1: the newest), or only what changed since ``have_version``."""
    call = stub.GetModel(pb.GetModelRequest(run=run, version=version, have_version=have_version))
    try:
        first = await call.read()
        if not isinstance(first, pb.GetModelResponse):
            raise ServiceError(f"run '{run}': the aggregator sent nothing at all; fetch the model again")
        incoming, tensors = _Incoming(call, run), {}
        for entry in first.content.tensors:
            tensors[entry.name] = await incoming.tensor(entry)
        if await call.read() is not aio.EOF:
            raise ServiceError(
                f"run '{run}': the aggregator sent more than it announced; fetch the model again"
            )
    finally:
        call.cancel()
    return Fetched(first.content.version, tensors, sum(entry.num_bytes for entry in first.content.tensors))


class _Incoming:
    """The payload of a model as it comes in; pieces need not end where tensors do."""

    def __init__(self, call: _Download, run: str) -> None:
        self._call, self._run = call, run
        self._position = 0
        self._piece = memoryview(b"")

    async def tensor(self, entry: model_pb2.TensorManifest) -> Array:
        values: Array = np.empty(tuple(entry.shape), dtype_from_pb(entry.dtype))
        target = values.reshape(-1).view(np.uint8).data
        filled, crc = 0, 0
        while filled < len(target):
            part = await self._next(len(target) - filled)
            target[filled : filled + len(part)] = part
            filled, crc = filled + len(part), zlib.crc32(part, crc)
        if crc != entry.crc32:
            raise ServiceError(
                f"run '{self._run}': tensor '{entry.name}' was damaged on the way; fetch it again"
            )
        return values

    async def _next(self, most: int) -> memoryview:
        """At most so many bytes, of the piece at hand or of the next one."""
        if not self._piece:
            message = await self._call.read()
            if not isinstance(message, pb.GetModelResponse) or message.chunk.offset != self._position:
                raise ServiceError(
                    f"run '{self._run}': the model breaks off at byte {self._position}; fetch it again"
                )
            self._piece = memoryview(message.chunk.data)
            self._position += len(self._piece)
        part, self._piece = self._piece[:most], self._piece[most:]
        return part


def model_header(
    run: str, strategy: Mapping[str, Any], spec: ModelSpec, keep_every: int = 0, late: str = "refuse"
) -> pb.ModelHeader:
    """What ``push_model`` announces; ``strategy`` is its table, ``spec`` that of the whole model."""
    return pb.ModelHeader(
        run=run,
        strategy_json=json.dumps(strategy, sort_keys=True),
        spec=spec_to_pb(spec),
        keep_every=keep_every,
        late_policy=late,
    )


async def push_model(stub: AggregatorServiceAsyncStub, header: pb.ModelHeader, tensors: Tensors) -> int:
    """Bring a run's first model, or one aggregator's share of it. Returns its version, which is 0."""
    payload = pack({name: Patch(values) for name, values in tensors.items()})
    announced = pb.ModelHeader()
    announced.CopyFrom(header)
    del announced.tensors[:]
    announced.tensors.extend(payload.manifest)

    call = stub.CreateModel()
    try:
        await _write(call, pb.CreateModelRequest(header=announced))
        for chunk in payload.chunks():
            await _write(call, pb.CreateModelRequest(chunk=chunk))
        await call.done_writing()
        return (await call).version
    finally:
        call.cancel()


async def push_update(
    stub: AggregatorServiceAsyncStub,
    run: str,
    report: Report,
    payload: Payload,
    on_permit: Callable[[int], None] | None = None,
) -> Pushed:
    """Send an update and wait until it is safe. With several aggregators each gets its own tensors' payload,
    an empty one too: an update counts once all of them have it. ``on_permit`` hears, when sending may begin,
    how many bytes are there already.
    """
    header = pb.UpdateHeader(
        run=run, report=report_to_pb(report), tensors=payload.manifest, digest=payload.digest
    )
    call = stub.PutUpdate()
    asked, sent = time.monotonic(), 0
    try:
        await _write(call, pb.PutUpdateRequest(header=header))
        answer = await _answer(call, run)
        waited = time.monotonic() - asked
        if answer.WhichOneof("kind") == "permit":
            offset = answer.permit.offset
            if on_permit is not None:
                on_permit(offset)
            for chunk in payload.chunks(offset):
                await _write(call, pb.PutUpdateRequest(chunk=chunk))
                sent += len(chunk.data)
            await call.done_writing()
            answer = await _answer(call, run)
        else:
            await call.done_writing()
    finally:
        call.cancel()
    return Pushed(answer.receipt.duplicate, waited, sent)


async def _write(call: Any, request: Any) -> None:
    try:
        await call.write(request)
    except asyncio.InvalidStateError:
        raise await _ended(call) from None
    except aio.AioRpcError as error:
        raise (_broken() if error.code() is grpc.StatusCode.INTERNAL else error) from None


async def _ended(call: Any) -> aio.AioRpcError:
    """What a call ended with that was over before we were through."""
    code = await call.code()
    if code in (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL):
        return _broken()
    return aio.AioRpcError(
        code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def _broken() -> aio.AioRpcError:
    # A connection that breaks under a write makes grpc.aio say INTERNAL, which nobody would try again.
    return aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), "the connection broke while sending"
    )


async def _answer(call: _Upload, run: str) -> pb.PutUpdateResponse:
    answer = await call.read()
    if isinstance(answer, pb.PutUpdateResponse):
        return answer
    raise ServiceError(f"run '{run}': the aggregator ended the upload without an answer; send it again")
