"""What comes over the network: messages, manifests and payloads, models."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fedel_aggregator.run_header import shard_spec
from google.protobuf.message import DecodeError, Message
from grpc import aio

from fedel import testing
from fedel.core.compression import compress_update, restored
from fedel.errors import FedelError
from fedel.roles.aggregator import RoundFold
from fedel.strategies import build
from fedel.types import PLAIN, Change, Patch, SentUpdate, Update, UploadSettings
from fedel.v1 import aggregator_pb2 as agg
from fedel.v1 import model_pb2, task_pb2
from fedel.v1.model_pb2 import Chunk
from fedel.wire import codec, payload
from fedel.wire.streams import fetch_model
from fedel.wire.views import UploadPiece, upload_message
from tests.fuzz import frames, samples
from tests.fuzz.mutate import message_case, mutate_bytes, mutate_values
from tests.fuzz.target import Mutator, Read, Target, Unreadable, parsed

_MODEL = testing.initial_model()
"""What updates are changes of."""


def _message(
    name: str, kind: type[Message], valid: Callable[[], Message], read: Callable[[Any], object]
) -> Target:
    return Target(
        name,
        lambda: [valid().SerializeToString()],
        message_case(kind),
        lambda _: lambda data: read(parsed(kind, data)),
    )


def _read_upload(data: bytes) -> object:
    """The same as protobuf reads."""
    try:
        expected = agg.PutUpdateRequest.FromString(data)
    except DecodeError:
        expected = None
    try:
        found = upload_message(data)
    except DecodeError:
        found = None
    if isinstance(found, UploadPiece):
        chunk = Chunk(offset=found.chunk.offset, data=bytes(found.chunk.data))
        found = agg.PutUpdateRequest(chunk=chunk)
        if expected is not None:
            expected.DiscardUnknownFields()  # type: ignore[attr-defined]
    if (found is None) != (expected is None) or (
        found is not None and found.SerializeToString() != expected.SerializeToString()
    ):
        raise AssertionError("not what protobuf reads")
    if found is None:
        raise Unreadable
    return found


def _read_task(message: task_pb2.Task) -> object:
    return codec.task_from_pb(message, samples.SPEC), codec.memory_from_pb(message.memory)


def _read_report(message: task_pb2.Report) -> object:
    read = codec.report_from_pb(message)
    return codec.report_from_pb(codec.report_to_pb(read))


def _read_spec(message: model_pb2.ModelSpec) -> object:
    spec = codec.spec_from_pb(message)
    return spec.digest, spec.num_bytes, spec.weights, spec.by_name


def _patches(data: bytes, upload: UploadSettings = PLAIN) -> Update:
    """A manifest, then its payload, as an aggregator receives them."""
    parts = frames.split(data)
    header = parsed(agg.UpdateHeader, parts[0] if parts else b"")
    assert isinstance(header, agg.UpdateHeader)
    pieces = memoryview(b"".join(parts[1:]))
    payload.digest(header.tensors)
    payload.check(header.tensors, samples.SPEC, upload)
    patches, at = dict[str, Patch | Change](), 0
    for entry in header.tensors:
        piece = pieces[at : at + entry.num_bytes]
        patches[entry.name] = payload.unpack(entry, piece, samples.SPEC.by_name[entry.name].shape)
        at += entry.num_bytes
    sent = SentUpdate(patches, codec.report_from_pb(header.report))
    return restored(upload, sent, _MODEL)


def _unpack(_: Path) -> Read:
    def read(data: bytes) -> object:
        update = _patches(data)
        for name, patch in update.patches.items():
            whole = np.zeros(samples.SPEC.by_name[name].shape, np.float32)
            whole[... if patch.where is None else patch.where] = patch.values
        return update

    return read


COMPRESSED = {
    "fp16": UploadSettings("fp16"),
    "int8": UploadSettings("int8"),
    "topk": UploadSettings("topk"),
    "topk_few": UploadSettings("topk", 0.01),
}
METHODS = ("fedavg", "fednova", "heterofl", "fiarse", "depthfl")


def _fold(_: Path, upload: UploadSettings = PLAIN) -> Read:
    """What is not refused folds, and leaves a finite model; what is refused leaves no trace."""
    strategies = [build({"name": name}) for name in METHODS]
    good = {name: samples.whole_update("client-9") for name in METHODS}
    alone = {}
    for strategy in strategies:
        fold = RoundFold(strategy, samples.SPEC)
        fold.add(good[strategy.name])
        alone[strategy.name] = fold.finish(_MODEL, {}).model

    def read(data: bytes) -> object:
        update = _patches(data, upload)
        refusal: FedelError | None = None
        for strategy in strategies:
            fold = RoundFold(strategy, samples.SPEC)
            try:
                fold.add(update)
            except FedelError as error:
                refusal = error
                fold.add(good[strategy.name])
                after = fold.finish(_MODEL, {}).model
                same = all(np.array_equal(after[name], alone[strategy.name][name]) for name in after)
                assert same, "a refused update left a trace"
            else:
                after = fold.finish(_MODEL, {}).model
                assert all(np.isfinite(values).all() for values in after.values()), "the model is not finite"
        if refusal is not None:
            raise refusal
        return update

    return read


def _uploads(upload: UploadSettings = PLAIN) -> list[bytes]:
    return [_sent(samples.update(), upload), _sent(samples.whole_update(), upload)]


def _sent(update: Update, upload: UploadSettings) -> bytes:
    sent, _ = compress_update(upload, samples.SPEC, update, _MODEL, {})
    packed = payload.pack(sent.patches)
    header = agg.UpdateHeader(
        run=samples.RUN,
        report=codec.report_to_pb(sent.report),
        tensors=packed.manifest,
        digest=packed.digest,
    )
    return frames.join([header.SerializeToString(), b"".join(packed.buffers)])


def _pick_upload(at: int, _: bytes) -> Mutator:
    return message_case(agg.UpdateHeader) if at == 0 else mutate_values


_change_upload = frames.frames_case(_pick_upload)


def _upload_case(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
    """Usually checksums and digest are made to fit again: an attacker can do that too."""
    changed = _change_upload(rng, valid, others)
    return resealed(changed) if rng.random() < 0.7 else changed


def resealed(data: bytes) -> bytes:
    parts = frames.split(data)
    try:
        header = agg.UpdateHeader.FromString(parts[0])
    except (DecodeError, IndexError):
        return data
    sent, at = b"".join(parts[1:]), 0
    for entry in header.tensors:
        size = min(max(entry.num_bytes, 0), len(sent))
        entry.crc32 = zlib.crc32(sent[at : at + size])
        at += size
    header.digest = payload.digest(header.tensors)
    return frames.join([header.SerializeToString(), sent])


class _Call:
    """The download of a server that sends whatever the case holds."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = iter(messages)

    async def read(self) -> object:
        message = next(self._messages, None)
        return aio.EOF if message is None else parsed(agg.GetModelResponse, message)

    def cancel(self) -> None:
        pass


class _Stub:
    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages

    def GetModel(self, _: object) -> _Call:
        return _Call(self._messages)


def _download(_: Path) -> Read:
    """Nothing in it really waits, so that it needs no event loop."""

    def read(data: bytes) -> object:
        fetching = fetch_model(_Stub(frames.split(data)), samples.RUN)  # type: ignore[arg-type]
        try:
            return fetching.send(None)
        except StopIteration as done:
            return done.value

    return read


def _pick_download(_at: int, _part: bytes) -> Mutator:
    return message_case(agg.GetModelResponse)


def _raw_upload(rng: Random, valid: bytes, others: Any) -> bytes:
    """Half by field, half by byte, and now and then a number that never ends."""
    draw = rng.random()
    if draw < 0.001:
        return valid[: rng.randrange(8)] + b"\xff" * rng.choice((11, 1_000, 300_000))
    by_field = message_case(agg.PutUpdateRequest)
    return mutate_bytes(rng, valid, others) if draw < 0.5 else by_field(rng, valid, others)


WIRE = (
    Target(
        "upload_message",
        lambda: [m.SerializeToString() for m in samples.upload_messages()],
        _raw_upload,
        lambda _: _read_upload,
        seconds=0.5,
    ),
    _message("model_spec", model_pb2.ModelSpec, lambda: codec.spec_to_pb(samples.SPEC), _read_spec),
    _message("task", task_pb2.Task, samples.task_message, _read_task),
    _message("report", task_pb2.Report, lambda: codec.report_to_pb(samples.report()), _read_report),
    _message("timing_profile", task_pb2.TimingProfile, samples.profile_message, codec.profile_from_pb),
    _message("model_header", agg.ModelHeader, samples.first_model, shard_spec),
    Target("update", _uploads, _upload_case, _unpack),
    Target("fold", _uploads, _upload_case, _fold),
    *(
        Target(f"fold_{name}", partial(_uploads, upload), _upload_case, partial(_fold, upload=upload))
        for name, upload in COMPRESSED.items()
    ),
    Target(
        "download",
        lambda: [frames.join([m.SerializeToString() for m in samples.download_messages()])],
        frames.frames_case(_pick_download),
        _download,
    ),
)
CODEC = ("upload_message", "model_spec", "task", "report", "timing_profile", "update")
"""These count together as the codec."""
