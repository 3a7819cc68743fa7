"""AggregatorService: the gRPC side of the runs, which decide everything themselves."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
from fedel_services.errors import refuse
from fedel_services.guard import require_client
from grpc import aio
from prometheus_client import CollectorRegistry

from fedel.errors import ConfigError, UpdateRefused
from fedel.telemetry import AggregatorMetrics
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1 import aggregator_pb2_grpc, model_pb2
from fedel.wire.payload import CHUNK_BYTES
from fedel.wire.views import UploadPiece, model_piece
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.files import safe_name
from fedel_aggregator.journal import Part
from fedel_aggregator.rounds import HEADER_FILE, NewRun, Run
from fedel_aggregator.spares import Spares
from fedel_aggregator.store import TensorFile
from fedel_aggregator.uploads import Stream, Uploads, drain, in_thread, in_time, receive

log = logging.getLogger("fedel.aggregator")
T = TypeVar("T")
PIECES_AT_ONCE = 4
"""Pieces of a model read in one go: each hand-over to a thread has its price."""

STATUS = {
    "checksum": grpc.StatusCode.DATA_LOSS,
    "conflict": grpc.StatusCode.ALREADY_EXISTS,
    "late": grpc.StatusCode.FAILED_PRECONDITION,
    "early": grpc.StatusCode.FAILED_PRECONDITION,
    "missing": grpc.StatusCode.FAILED_PRECONDITION,
    "unknown_run": grpc.StatusCode.NOT_FOUND,
    "unknown_version": grpc.StatusCode.NOT_FOUND,
    "superseded": grpc.StatusCode.ABORTED,
    "sealed": grpc.StatusCode.UNAVAILABLE,
    "starting": grpc.StatusCode.UNAVAILABLE,
    "idle": grpc.StatusCode.DEADLINE_EXCEEDED,
    "disk": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""How a refusal ends its call; a reason that is not here is the caller's mistake: INVALID_ARGUMENT."""
BROKEN = ("superseded", "idle")
"""Refusals that only say that a connection is gone."""


class Aggregator(aggregator_pb2_grpc.AggregatorServiceServicer):
    """All runs of one data directory."""

    def __init__(self, config: AggregatorConfig, metrics: AggregatorMetrics | None = None) -> None:
        self._config = config
        self.metrics = metrics or AggregatorMetrics(CollectorRegistry())
        self._folder = config.data_dir / "runs"
        self._spares = Spares(config.data_dir / "spare")
        self._uploads = Uploads(config.max_uploads)
        self._downloads = asyncio.Semaphore(config.max_downloads)
        self._runs: dict[str, Run] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._loaded = False
        self.counts: Counter[str] = Counter()
        """What happened so far: ``committed``, ``duplicate``, ``refused:<reason>``, ``bytes_up``, ..."""

    def load(self) -> None:
        """Take up every run where it was, folding again what had been acknowledged."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in sorted(self._folder.iterdir()):
            if (folder / HEADER_FILE).exists():
                run = Run(folder, self._spares)
                self._runs[run.name] = run
                extra = {"run": run.name, "round": run.version, "num_updates": len(run.headers)}
                log.info("took up a run", extra=extra)

        self._loaded = True

    def refresh(self) -> None:
        """Set the gauges that tell how things are now."""
        for run in self._runs.values():
            self.metrics.version.labels(run.name).set(run.version)
        self.metrics.permits.set(self._uploads.num_sending)
        self.metrics.waiting.set(self._uploads.num_waiting)
        disk = shutil.disk_usage(self._config.data_dir)
        self.metrics.disk_free.set(disk.free)
        self.metrics.disk_size.set(disk.total)

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise UpdateRefused("starting", "the aggregator is still reading its runs: try again in a moment")

    def _run(self, name: str) -> Run:
        self._check_loaded()
        try:
            return self._runs[name]
        except KeyError:
            known = ", ".join(sorted(self._runs)) or "none"
            raise UpdateRefused("unknown_run", f"no run '{name}' here; there are: {known}") from None

    def _lock(self, run: str) -> asyncio.Lock:
        return self._locks.setdefault(run, asyncio.Lock())

    async def _answer(self, context: Any, work: Coroutine[Any, Any, T], **about: Any) -> T:
        """Do a call's work; refusals become statuses and are counted."""
        try:
            return await work
        except UpdateRefused as refusal:
            await self._refuse(context, refusal.reason, str(refusal), about)
        except ConfigError as error:
            await self._refuse(context, "header", str(error), about)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                await self._refuse(context, "disk", f"the aggregator's disk is full: {error}", about)
            raise

    async def _refuse(self, context: Any, reason: str, message: str, about: dict[str, Any]) -> NoReturn:
        self.counts[f"refused:{reason}"] += 1
        log.warning("refused: %s", message, extra={"reason": reason, **about})
        await refuse(context, STATUS.get(reason, grpc.StatusCode.INVALID_ARGUMENT), message, reason)

    async def _header(self, context: Any) -> Any:
        first = await in_time(context.read(), self._config.idle_seconds)
        if first is aio.EOF or isinstance(first, UploadPiece) or first.WhichOneof("kind") != "header":
            raise UpdateRefused("header", "a stream begins with its header")
        return first.header

    async def CreateModel(self, _requests: Any, context: Any) -> pb.CreateModelResponse:
        header = await self._answer(context, self._header(context))
        async with self._lock(header.run):
            await self._answer(context, self._create(header, context), run=header.run)
        return pb.CreateModelResponse(version=0)

    async def _create(self, header: pb.ModelHeader, context: Any) -> None:
        self._check_loaded()
        idle_seconds = self._config.idle_seconds
        try:
            new = await self._new_run(header)
        except (UpdateRefused, ConfigError):
            await in_time(drain(context), idle_seconds)
            raise
        if new is None:
            await in_time(drain(context), idle_seconds)
            return
        try:
            await receive(context, new, Stream(), idle_seconds)
            self._runs[header.run] = await in_thread(new.finish)
        finally:
            new.close()
        log.info("new run", extra={"run": header.run, "model_bytes": new.num_bytes})

    async def _new_run(self, header: pb.ModelHeader) -> NewRun | None:
        """A place for a first model; ``None`` if the run is here already."""
        folder = self._folder / safe_name(header.run)
        if header.run not in self._runs and (folder / HEADER_FILE).exists():
            self._runs[header.run] = await in_thread(Run, folder, self._spares)
        if header.run not in self._runs:
            return await in_thread(NewRun, folder, header, self._spares)
        if self._runs[header.run].header != header:
            raise UpdateRefused("conflict", f"run '{header.run}' exists with another model: rename the new one")
        return None

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> None:  # type: ignore[override]
        async with self._downloads:
            await self._answer(context, self._get(request, context), run=request.run)

    async def _get(self, request: pb.GetModelRequest, context: Any) -> None:
        run = self._run(request.run)
        version = run.version if request.version < 0 else request.version
        meta = await in_thread(run.versions.meta, version)
        # A caller that is ahead of us holds another history: it gets everything.
        held = request.have_version if request.have_version <= version else -1
        names = [t.name for t in run.spec.tensors if meta.changed[t.name] > held]
        with await in_thread(run.versions.open, version) as file:
            manifest = [_entry(name, file, meta.crc32[name]) for name in names]
            await self._send(context, content=pb.ModelContent(version=version, tensors=manifest))
            sent = 0
            pieces = list(_pieces(file, names))
            for start in range(0, len(pieces), PIECES_AT_ONCE):
                batch = pieces[start : start + PIECES_AT_ONCE]
                messages = await in_thread(_read, file, batch, sent)
                await in_time(_send_pieces(context, messages), self._config.idle_seconds)
                sent += sum(num_bytes for _, num_bytes in batch)
        self.counts["bytes_down"] += sent
        self.metrics.download_bytes.inc(sent)

    async def _send(self, context: Any, **kind: Any) -> None:
        await in_time(context.write(pb.GetModelResponse(**kind)), self._config.idle_seconds)

    async def PutUpdate(self, _requests: Any, context: Any) -> None:  # type: ignore[override]
        header: pb.UpdateHeader = await self._answer(context, self._header(context))
        report = header.report
        await require_client(context, report.client)
        about = {"run": header.run, "round": report.round_num, "client": report.client}
        async with self._uploads.turn(header.run, report.client) as stream:
            putting = self._counted(self._put(header, stream, context))
            duplicate = await self._answer(context, putting, **about)
        self.counts["duplicate" if duplicate else "committed"] += 1
        receipt = pb.UploadReceipt(digest=header.digest, duplicate=duplicate)
        await context.write(pb.PutUpdateResponse(receipt=receipt))

    async def _counted(self, putting: Coroutine[Any, Any, bool]) -> bool:
        """Count an upload by how it ends; one whose client comes again, or fell silent, just broke."""
        outcome = "broken"
        try:
            duplicate = await putting
            outcome = "duplicate" if duplicate else "accepted"
            return duplicate
        except UpdateRefused as refusal:
            self.metrics.refused.labels(refusal.reason).inc()
            outcome = outcome if refusal.reason in BROKEN else "refused"
            raise
        finally:
            self.metrics.uploads.labels(outcome).inc()

    async def _put(self, header: pb.UpdateHeader, stream: Stream, context: Any) -> bool:
        """Take an update; true if it was in already."""
        run = self._run(header.run)
        async with self._lock(run.name):
            if run.admit(header):
                return True
        async with self._uploads.permit(stream):
            async with self._lock(run.name):
                part = await in_thread(run.begin, header)
            if part is None:
                return True
            try:
                return not await self._receive(run, part, stream, context)
            finally:
                part.close()

    async def _receive(self, run: Run, part: Part, stream: Stream, context: Any) -> bool:
        offset = part.received
        await context.write(pb.PutUpdateResponse(permit=pb.UploadPermit(offset=offset)))
        try:
            await receive(context, part, stream, self._config.idle_seconds)
        finally:
            self.metrics.upload_bytes.inc(part.received - offset)
        self.counts["bytes_up"] += part.received - offset
        await in_thread(part.sync)
        async with self._lock(run.name):
            with self.metrics.folding.time():
                return await in_thread(run.take, part)

    async def _alone(self, run: str, method: Callable[..., T], *arguments: Any) -> T:
        """Call a run's method in a thread, while nobody else is at this run."""
        found = self._run(run)
        async with self._lock(run):
            return await in_thread(method, found, *arguments)

    async def SealRound(self, request: pb.SealRoundRequest, context: Any) -> pb.SealRoundResponse:
        work = self._alone(request.run, Run.seal, request.round_num)
        return await self._answer(context, work, run=request.run, round=request.round_num)

    async def CommitRound(self, request: pb.CommitRoundRequest, context: Any) -> pb.CommitRoundResponse:
        about = {"run": request.run, "round": request.round_num}
        work = self._alone(request.run, Run.commit, request.round_num, tuple(request.clients))
        answer = await self._answer(context, work, **about)
        self.metrics.committing.observe(answer.commit_seconds)
        seconds = {"fold_seconds": answer.fold_seconds, "commit_seconds": answer.commit_seconds}
        log.info("closed a round with %d updates", len(request.clients), extra={**about, **seconds})
        return answer

    async def KeepVersion(self, request: pb.KeepVersionRequest, context: Any) -> pb.KeepVersionResponse:
        work = self._alone(request.run, Run.keep, request.version, request.label)
        await self._answer(context, work, run=request.run)
        return pb.KeepVersionResponse()


def _entry(name: str, file: TensorFile, crc32: int) -> model_pb2.TensorManifest:
    place = file.places[name]
    return model_pb2.TensorManifest(
        name=name,
        dtype=model_pb2.DTYPE_FLOAT32,
        shape=place.shape,
        num_bytes=place.num_bytes,
        crc32=crc32,
    )


async def _send_pieces(context: Any, messages: Sequence[bytes]) -> None:
    for message in messages:
        await context.write(message)


def _read(file: TensorFile, pieces: Sequence[tuple[int, int]], position: int) -> list[bytes]:
    """Messages with these pieces of a file; ``position`` is that of the first in what is sent."""
    messages = []
    for offset, num_bytes in pieces:
        messages.append(model_piece(position, file.read(offset, num_bytes)))
        position += num_bytes
    return messages


def _pieces(file: TensorFile, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Offset and size of each piece to send; tensors that stand side by side in the file share pieces."""
    spans: list[list[int]] = []
    for place in (file.places[name] for name in names):
        if spans and spans[-1][1] == place.offset:
            spans[-1][1] += place.num_bytes
        else:
            spans.append([place.offset, place.offset + place.num_bytes])
    for begin, end in spans:
        for offset in range(begin, end, CHUNK_BYTES):
            yield offset, min(CHUNK_BYTES, end - offset)
