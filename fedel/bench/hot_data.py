"""What the aggregator does with the bytes of an update and of a version, step by step, each with its floor."""

from __future__ import annotations

import asyncio
import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fedel_aggregator.first_model import FirstModel
from fedel_aggregator.limits import Pace
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.run import ShardRun
from fedel_aggregator.shared_reads import SharedReads
from fedel_aggregator.streams import BATCH_BYTES, send_model

from fedel.bench.cpu import Case
from fedel.bench.workloads import Workload, values
from fedel.roles.aggregator import RoundFold
from fedel.strategies import build
from fedel.types import Array, Patch, Report, Update
from fedel.v1 import aggregator_pb2 as pb
from fedel.wire import payload, views
from fedel.wire.codec import report_to_pb
from fedel.wire.streams import model_header

RUN, CLIENT, STRATEGY = "bench", "client-0", {"name": "fedavg"}
KEPT = 0.5
"""Share of a tensor's values, or of each of its sides, that slices and bit masks cover."""


def cases(of: Workload, folder: Path) -> Iterator[Case]:
    new = values(of, 1)
    sent = payload.pack({name: Patch(array) for name, array in new.items()})
    about = f"an update, {of.num_bytes / 1e6:.0f} MB"
    flat = np.concatenate([array.reshape(-1) for array in new.values()])
    yield _decode(sent, flat, about)
    yield _checksum(sent, of, flat, about)
    yield from _folds(of, new)
    yield from _disk(of, sent, flat, folder, about)


def _decode(sent: payload.Payload, flat: Array, about: str) -> Case:
    messages = [pb.PutUpdateRequest(chunk=chunk).SerializeToString() for chunk in sent.chunks()]
    target = np.empty_like(flat)
    return Case(
        "decode chunks",
        about,
        lambda: [views.upload_message(message) for message in messages],
        "copy the bytes once",
        lambda: np.copyto(target, flat),
    )


def _checksum(sent: payload.Payload, of: Workload, flat: Array, about: str) -> Case:
    shapes = {t.name: t.shape for t in of.spec.tensors}
    pairs = list(zip(sent.manifest, sent.buffers, strict=True))
    data = flat.view(np.uint8).data
    return Case(
        "check and unpack",
        about,
        lambda: [payload.unpack(entry, buffer, shapes[entry.name]) for entry, buffer in pairs],
        "crc32 of the bytes",
        lambda: zlib.crc32(data),
    )


def _folds(of: Workload, new: dict[str, Array]) -> Iterator[Case]:
    rng = np.random.default_rng(0)

    def part(array: Array) -> tuple[slice, ...]:
        return tuple(slice(0, max(1, int(KEPT * side))) for side in array.shape)

    masks = {name: rng.random(array.shape) < KEPT for name, array in new.items()}
    kinds = {
        "whole tensors": {name: Patch(array) for name, array in new.items()},
        "slices": {n: Patch(np.ascontiguousarray(a[part(a)]), part(a)) for n, a in new.items()},
        "bit masks": {name: Patch(array[masks[name]], masks[name]) for name, array in new.items()},
    }
    for kind, patches in kinds.items():
        size = sum(patch.values.size for patch in patches.values())
        source, total = np.ones(size, np.float32), np.zeros(size, np.float32)
        fold, numbers = RoundFold(build(STRATEGY), of.spec), itertools.count()

        def add(fold: RoundFold = fold, patches: Any = patches, numbers: Any = numbers) -> None:
            fold.add(Update(patches, Report(f"client-{next(numbers)}", 0, 100, 50, 50.0, 0.5)))

        yield Case(
            f"fold, {kind}",
            f"{4 * size / 1e6:.0f} MB of values",
            add,
            "add float32",
            lambda total=total, source=source: np.add(total, source, out=total),  # type: ignore[misc]
        )


def _disk(of: Workload, sent: payload.Payload, flat: Array, folder: Path, about: str) -> Iterator[Case]:
    run = _new_run(of, folder)
    pieces = [chunk.data for chunk in sent.chunks(chunk_bytes=BATCH_BYTES)]
    view, file = flat.view(np.uint8).data, folder / "floor"

    def receive() -> Any:
        """As an upload does, without the network and the fold."""
        part = _begin(run, sent, run.version)
        for piece in pieces:
            part.append([piece])
        part.sync()
        return part

    def write() -> None:
        with file.open("wb", buffering=0) as out:
            for start in range(0, len(view), BATCH_BYTES):
                out.write(view[start : start + BATCH_BYTES])
            os.fsync(out.fileno())

    def journal() -> None:
        part = receive()
        part.close()
        part.path.unlink()

    run.open(_plan(run.version))
    yield Case("journal", about, journal, "write and fsync", write)

    def close_round() -> None:
        answer = run.seal(run.version)
        run.commit(run.version, tuple(report.client for report in answer.reports), None)

    def round_of_one() -> None:
        run.open(_plan(run.version))
        part = receive()
        run.take(part)
        part.close()
        close_round()

    round_of_one()
    yield Case("a round of one update", f"{about}, and the new version", round_of_one, "write and fsync", write)

    def download() -> None:
        request, pace = pb.GetModelRequest(run=RUN, version=-1), Pace(60.0, 0)
        asyncio.run(send_model(_Nobody(), run, request, pace, SharedReads(), print))

    yield Case(
        "download", f"a version, {of.num_bytes / 1e6:.0f} MB", download, "read the file", file.read_bytes
    )


class _Nobody:
    """A caller that takes everything."""

    async def write(self, _message: Any) -> None: ...


def _new_run(of: Workload, folder: Path) -> ShardRun:
    first = payload.pack({name: Patch(array) for name, array in values(of, 0).items()})
    header = model_header(RUN, STRATEGY, of.spec)
    header.tensors.extend(first.manifest)
    model = FirstModel(folder / RUN, header, RecycledFiles(folder / "spare"))
    for chunk in first.chunks(chunk_bytes=BATCH_BYTES):
        model.append([chunk.data])
    run = model.finish()
    model.close()
    return run


def _plan(round_num: int) -> pb.OpenRoundRequest:
    client = pb.Participant(
        client=CLIENT, round_num=round_num, num_samples=100, max_steps=50, max_effective_steps=50.0
    )
    return pb.OpenRoundRequest(run=RUN, round_num=round_num, participants=[client])


def _begin(run: ShardRun, sent: payload.Payload, round_num: int) -> Any:
    report = Report(CLIENT, round_num, 100, 50, 50.0, 0.5)
    header = pb.UpdateHeader(run=RUN, report=report_to_pb(report), tensors=sent.manifest, digest=sent.digest)
    upload = run.examine(header)
    assert upload is not None, "it has not sent in this round"
    return run.begin(upload, header)
