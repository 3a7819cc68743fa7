"""AggregatorService: the gRPC side of the runs, which decide everything themselves."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from fedel.errors import ConfigError, UpdateRefused
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1 import aggregator_pb2_grpc, model_pb2
from fedel.wire.payload import CHUNK_BYTES
from services.aggregator.config import AggregatorConfig
from services.aggregator.files import safe_name
from services.aggregator.journal import Part
from services.aggregator.rounds import HEADER_FILE, NewRun, Run
from services.aggregator.store import TensorFile
from services.aggregator.uploads import Uploads, in_thread, receive
from services.runtime import refuse

log = logging.getLogger("fedel.aggregator")

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
    "idle": grpc.StatusCode.DEADLINE_EXCEEDED,
    "disk": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""How a refusal ends its call; a reason that is not here is the caller's mistake: INVALID_ARGUMENT."""


class Aggregator(aggregator_pb2_grpc.AggregatorServiceServicer):
    """All runs of one data directory."""

    def __init__(self, config: AggregatorConfig) -> None:
        self._config = config
        self._folder = config.data_dir / "runs"
        self._uploads = Uploads(config.max_uploads, config.idle_seconds)
        self._downloads = asyncio.Semaphore(config.max_downloads)
        self._runs: dict[str, Run] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self.counts: Counter[str] = Counter()
        """What happened so far: ``committed``, ``duplicate``, ``refused:<reason>``, ``bytes_up``, ..."""

    def load(self) -> None:
        """Take up every run where it was, folding again what had been acknowledged."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in sorted(self._folder.iterdir()):
            if (folder / HEADER_FILE).exists():
                run = Run(folder)
                self._runs[run.name] = run
                extra = {"run": run.name, "round": run.version, "num_updates": len(run.headers)}
                log.info("took up a run", extra=extra)

    def _run(self, name: str) -> Run:
        try:
            return self._runs[name]
        except KeyError:
            known = ", ".join(sorted(self._runs)) or "none"
            raise UpdateRefused("unknown_run", f"no run '{name}' here; there are: {known}") from None

    def _lock(self, run: str) -> asyncio.Lock:
        return self._locks.setdefault(run, asyncio.Lock())

    @asynccontextmanager
    async def _refusing(self, context: Any, **about: Any) -> AsyncIterator[None]:
        """Turn refusals into statuses, and count them."""
        try:
            yield
        except UpdateRefused as refusal:
            await self._refuse(context, refusal.reason, str(refusal), about)
        except ConfigError as error:
            await self._refuse(context, "header", str(error), about)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            await self._refuse(context, "disk", f"the aggregator's disk is full: {error}", about)

    async def _refuse(self, context: Any, reason: str, message: str, about: dict[str, Any]) -> None:
        self.counts[f"refused:{reason}"] += 1
        log.warning("refused: %s", message, extra={"reason": reason, **about})
        await refuse(context, STATUS.get(reason, grpc.StatusCode.INVALID_ARGUMENT), message, reason)

    async def CreateModel(self, request_iterator: Any, context: Any) -> pb.CreateModelResponse:
        async with self._refusing(context):
            header = await self._header(context)
            async with self._lock(header.run):
                await self._create(header, context)
        return pb.CreateModelResponse(version=0)

    async def _header(self, context: Any) -> Any:
        first = await asyncio.wait_for(context.read(), self._config.idle_seconds)
        if first is aio.EOF or first.WhichOneof("kind") != "header":
            raise UpdateRefused("header", "a stream begins with its header")
        return first.header

    async def _create(self, header: pb.ModelHeader, context: Any) -> None:
        existing = self._runs.get(header.run)
        if existing is not None:
            if existing.header != header:
                raise UpdateRefused("conflict", f"run '{header.run}' exists with another model: choose another name")
            return
        new = await in_thread(NewRun, self._folder / safe_name(header.run), header)
        try:
            await receive(lambda: asyncio.wait_for(context.read(), self._config.idle_seconds), new)
        except BaseException as error:
            new.abandon(error)
            raise
        self._runs[header.run] = await in_thread(new.finish)
        log.info("new run", extra={"run": header.run, "model_bytes": new.num_bytes})

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> None:  # type: ignore[override]
        async with self._refusing(context, run=request.run), self._downloads:
            run = self._run(request.run)
            version = run.version if request.version < 0 else request.version
            meta = await in_thread(run.versions.meta, version)
            known = request.have_version if request.have_version <= version else -1
            names = [t.name for t in run.spec.tensors if meta.changed[t.name] > known]
            with await in_thread(run.versions.open, version) as file:
                manifest = [_entry(name, file, meta.crc32[name]) for name in names]
                await self._send(context, content=pb.ModelContent(version=version, tensors=manifest))
                sent = 0
                for offset, num_bytes in _pieces(file, names):
                    data = await in_thread(file.read, offset, num_bytes)
                    await self._send(context, chunk=model_pb2.Chunk(offset=sent, data=data))
                    sent += num_bytes
            self.counts["bytes_down"] += sent

    async def _send(self, context: Any, **kind: Any) -> None:
        try:
            await asyncio.wait_for(context.write(pb.GetModelResponse(**kind)), self._config.idle_seconds)
        except asyncio.TimeoutError:
            raise UpdateRefused("idle", "the caller stopped reading: fetch the model again") from None

    async def PutUpdate(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        async with self._refusing(context):
            header: pb.UpdateHeader = await self._header(context)
        report = header.report
        about = {"run": header.run, "round": report.round_num, "client": report.client}
        async with self._refusing(context, **about):
            run = self._run(header.run)
            async with self._uploads.turn(run.name, report.client) as stream:
                async with self._lock(run.name):
                    duplicate = run.admit(header)
                if not duplicate:
                    async with self._uploads.permit(stream):
                        duplicate = not await self._take(run, header, stream, context)
        self.counts["duplicate" if duplicate else "committed"] += 1
        receipt = pb.UploadReceipt(digest=header.digest, duplicate=duplicate)
        await context.write(pb.PutUpdateResponse(receipt=receipt))

    async def _take(self, run: Run, header: pb.UpdateHeader, stream: Any, context: Any) -> bool:
        """Receive an update and let it count; false if it was in already."""
        async with self._lock(run.name):
            part = await in_thread(run.begin, header)
        if part is None:
            return False
        try:
            offset = part.received
            await context.write(pb.PutUpdateResponse(permit=pb.UploadPermit(offset=offset)))
            await receive(lambda: self._uploads.read(stream, context), part)
            self.counts["bytes_up"] += part.received - offset
            await in_thread(part.sync)
            return await _to_the_end(self._count(run, part))
        finally:
            part.close()

    async def _count(self, run: Run, part: Part) -> bool:
        async with self._lock(run.name):
            return await in_thread(run.take, part)

    async def SealRound(self, request: pb.SealRoundRequest, context: Any) -> pb.SealRoundResponse:
        async with self._refusing(context, run=request.run, round=request.round_num):
            run = self._run(request.run)
            async with self._lock(run.name):
                return await in_thread(run.seal, request.round_num)

    async def CommitRound(self, request: pb.CommitRoundRequest, context: Any) -> pb.CommitRoundResponse:
        async with self._refusing(context, run=request.run, round=request.round_num):
            run = self._run(request.run)
            async with self._lock(run.name):
                answer = await in_thread(run.commit, request.round_num, request.clients)
            log.info(
                "round %d closed with %d updates",
                request.round_num,
                len(request.clients),
                extra={
                    "run": run.name,
                    "round": request.round_num,
                    "version": answer.version,
                    "fold_seconds": round(answer.fold_seconds, 3),
                    "commit_seconds": round(answer.commit_seconds, 3),
                },
            )
            return answer

    async def KeepVersion(self, request: pb.KeepVersionRequest, context: Any) -> pb.KeepVersionResponse:
        async with self._refusing(context, run=request.run):
            run = self._run(request.run)
            async with self._lock(run.name):
                await in_thread(run.keep, request.version, request.label)
        return pb.KeepVersionResponse()
