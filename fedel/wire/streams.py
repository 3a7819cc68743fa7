"""A caller's side of the aggregator's streams: fetch a model, send a first model, send an update.

Each function makes one attempt and lets ``grpc.aio.AioRpcError`` through: the caller decides whether to try
again (``fedel.wire.retry``). A repeated ``push_update`` continues where the last attempt broke, because the
aggregator says what it has.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np
from grpc import aio

from fedel import checksum
from fedel.errors import ModelError, ServiceError, UpdateRefused
from fedel.types import Array, ModelSpec, Patch, Report, Tensors
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1 import model_pb2
from fedel.wire.codec import dtype_from_pb, report_to_pb, spec_to_pb
from fedel.wire.payload import Payload, check, pack

if TYPE_CHECKING:
    from fedel.v1.aggregator_pb2_grpc import AggregatorServiceAsyncStub

    _Download = aio.UnaryStreamCall[pb.GetModelRequest, pb.GetModelResponse]
    _Upload = aio.StreamStreamCall[pb.PutUpdateRequest, pb.PutUpdateResponse]

MAX_AXES = 32
"""Of a tensor, as in numpy."""
REASON = "fedel-reason"
"""Trailing metadata of a refused call: a short word that says why."""


class Fetched(NamedTuple):
    """The answer to ``fetch_model``."""

    version: int
    tensors: dict[str, Array]
    """What changed since the version the caller has; they replace its own. What it needs and is not here is
    the same in this version."""
    num_bytes: int


@dataclass
class Pushed:
    """What sending an update took, over all attempts that were given the same record."""

    duplicate: bool = False
    """The aggregator had the update already; it counts once."""
    wait_seconds: float = 0.0
    """From the making of this record until sending was first permitted."""
    num_bytes: int = 0
    """Bytes of the payload that the aggregator did not have when sending was first permitted."""
    _begin: float = field(default_factory=time.monotonic)
    _permitted: bool = False

    def permitted(self, num_bytes: int) -> None:
        """Sending may begin; ``num_bytes`` of the payload are still to be sent."""
        if not self._permitted:
            self.wait_seconds, self.num_bytes = time.monotonic() - self._begin, num_bytes
        self._permitted = True


def reason_of(error: aio.AioRpcError) -> str:
    """The short word for why the aggregator refused (``late``, ``shape``, ...); empty if there is none."""
    word = dict(error.trailing_metadata() or ()).get(REASON, "")
    return word.decode() if isinstance(word, bytes) else word


async def fetch_model(
    stub: AggregatorServiceAsyncStub,
    run: str,
    version: int = -1,
    have_version: int = -1,
    spec: ModelSpec | None = None,
    held: Mapping[str, int] | None = None,
    *,
    average: bool = False,
) -> Fetched:
    """A version of the model (-1 for the newest), or only what changed since ``have_version``; with ``average``
    the tensors of which the run keeps an average, averaged over the versions up to this one.

    ``held`` names the tensors that are needed, with the version that the caller has of each (-1: none): those
    that changed since are fetched. Names become places in the model's ``spec``. What is announced and does not
    fit ``spec`` and ``held`` is refused before memory is allocated for it.
    """
    request = pb.GetModelRequest(run=run, version=version, have_version=have_version, average=average)
    if spec is not None and held is not None:
        request.tensors.extend(place for place, t in enumerate(spec.tensors) if t.name in held)
        request.have_versions.extend(held[t.name] for t in spec.tensors if t.name in held)
    call = stub.GetModel(request)
    try:
        first = await call.read()
        if not isinstance(first, pb.GetModelResponse):
            raise ServiceError(f"run '{run}': the aggregator sent nothing; fetch the model again")
        if objection := _objection_to_content(first.content, version, spec, held):
            raise ModelError(f"run '{run}': what the aggregator announces is not the model: {objection}")
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


def _objection_to_content(
    content: pb.ModelContent, version: int, spec: ModelSpec | None, needed: Collection[str] | None
) -> str:
    """What is wrong with it, for people; empty if nothing is."""
    if version >= 0 and content.version != version:
        return f"it sends version {content.version}, not {version}"
    for entry in content.tensors:
        shape, name = entry.shape, entry.name[:200]
        if needed is not None and entry.name not in needed:
            return f"tensor '{name}' was not asked for"
        if entry.where.ByteSize() or len(shape) > MAX_AXES:
            return f"tensor '{name}' is only a part, or has {len(shape)} axes"
        if min(shape, default=0) < 0 or entry.num_bytes != 4 * math.prod(shape):
            return f"tensor '{name}' announces {entry.num_bytes} bytes, but its shape needs another number"
    try:
        if spec is not None:
            check(content.tensors, spec)
    except UpdateRefused as error:
        return str(error)[:1000]
    return ""


class _Incoming:
    """The payload of a model as it arrives; a message need not end where a tensor does."""

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
            filled, crc = filled + len(part), checksum.crc32(part, crc)
        if crc != entry.crc32:
            raise ServiceError(
                f"run '{self._run}': tensor '{entry.name}' was damaged in transit; fetch it again"
            )
        return values

    async def _next(self, most: int) -> memoryview:
        """At most ``most`` bytes, of the current message or of the next one."""
        if not self._piece:
            message = await self._call.read()
            chunk = message.chunk if isinstance(message, pb.GetModelResponse) else model_pb2.Chunk()
            if not chunk.data or chunk.offset != self._position:
                raise ServiceError(
                    f"run '{self._run}': the model breaks off at byte {self._position}; fetch it again"
                )
            self._piece = memoryview(chunk.data)
            self._position += len(self._piece)
        part, self._piece = self._piece[:most], self._piece[most:]
        return part


def model_header(
    run: str,
    strategy: Mapping[str, Any],
    spec: ModelSpec,
    keep_every: int = 0,
    late: str = "refuse",
    protection: Mapping[str, Any] | None = None,
    upload: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    max_staleness: int = 0,
    staleness_power: float = 0.0,
    code_sha256: str = "",
) -> pb.ModelHeader:
    """The first message of ``push_model``. ``strategy``, ``protection``, ``upload`` and ``server`` are tables
    of the configuration, ``spec`` is that of the whole model."""
    return pb.ModelHeader(
        run=run,
        strategy_json=json.dumps(strategy, sort_keys=True),
        spec=spec_to_pb(spec),
        keep_every=keep_every,
        late_policy=late,
        protection_json=json.dumps(protection or {}, sort_keys=True),
        upload_json=json.dumps(upload or {}, sort_keys=True),
        server_json=json.dumps(server or {}, sort_keys=True),
        max_staleness=max_staleness,
        staleness_power=staleness_power,
        code_sha256=code_sha256,
    )


async def push_model(stub: AggregatorServiceAsyncStub, header: pb.ModelHeader, tensors: Tensors) -> int:
    """Send a run's first model, or one aggregator's share of it. Returns its version, which is 0."""
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
    pushed: Pushed | None = None,
    attempt: int = 0,
) -> Pushed:
    """Send an update and wait until it is stored. With several aggregators, each is sent its own tensors, even
    if there are none: an update counts once all of them have it. ``pushed`` is the record of earlier attempts.
    """
    pushed = pushed or Pushed()
    header = pb.UpdateHeader(
        run=run,
        report=report_to_pb(report),
        tensors=payload.manifest,
        digest=payload.digest,
        attempt=attempt,
    )
    call = stub.PutUpdate()
    try:
        await _write(call, pb.PutUpdateRequest(header=header))
        answer = await _answer(call, run)
        if answer.WhichOneof("kind") == "permit":
            offset = answer.permit.offset
            pushed.permitted(payload.num_bytes - offset)
            for chunk in payload.chunks(offset):
                await _write(call, pb.PutUpdateRequest(chunk=chunk))
            await call.done_writing()
            answer = await _answer(call, run)
        else:
            await call.done_writing()
    finally:
        call.cancel()
    pushed.duplicate = answer.receipt.duplicate
    return pushed


async def _write(call: Any, request: Any) -> None:
    try:
        await call.write(request)
    except asyncio.InvalidStateError:
        raise await _ended(call) from None
    except aio.AioRpcError as error:
        raise (_broken() if error.code() is grpc.StatusCode.INTERNAL else error) from None


async def _ended(call: Any) -> aio.AioRpcError:
    """The status of a call that ended while we were still sending."""
    code = await call.code()
    if code in (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL):
        return _broken()
    return aio.AioRpcError(
        code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def _broken() -> aio.AioRpcError:
    # When a connection breaks during a write, grpc.aio reports INTERNAL, which is not worth retrying.
    return aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), "the connection broke while sending"
    )


async def _answer(call: _Upload, run: str) -> pb.PutUpdateResponse:
    answer = await call.read()
    if isinstance(answer, pb.PutUpdateResponse):
        return answer
    raise ServiceError(f"run '{run}': the aggregator ended the upload without an answer; send it again")
