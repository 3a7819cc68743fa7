"""AggregatorService: the gRPC side of the runs.

The order of an upload is in ``PutUpdate`` and ``_receive``; what the runs do with it is in ``run.py``.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

from fedel_services.errors import describe_call
from fedel_services.guard import require_client
from fedel_services.threads import in_thread
from prometheus_client import CollectorRegistry

from fedel.errors import UpdateRefused
from fedel.files import safe_name
from fedel.telemetry import AggregatorMetrics
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1 import aggregator_pb2_grpc
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.first_model import FirstModel
from fedel_aggregator.permits import ClientStream, UploadPermits
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.run import HEADER_FILE, ShardRun
from fedel_aggregator.streams import drain, in_batches, in_time, read_header, receive_payload, send_model

log = logging.getLogger("fedel.aggregator")
T = TypeVar("T")
BROKEN = ("superseded", "idle")
"""Refusals that only mean that a connection is gone."""


class Aggregator(aggregator_pb2_grpc.AggregatorServiceServicer):
    """All runs of one data directory."""

    def __init__(self, config: AggregatorConfig, registry: CollectorRegistry) -> None:
        self._config, self.registry = config, registry
        self._metrics = AggregatorMetrics(registry)
        self._folder = config.data_dir / "runs"
        self._recycled = RecycledFiles(config.data_dir / "spare")
        self._permits = UploadPermits(config.max_uploads)
        self._downloads = asyncio.Semaphore(config.max_downloads)
        self._runs: dict[str, ShardRun] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._loaded = False

    def load(self) -> None:
        """Continue every run where it was, and fold again what had been acknowledged."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in sorted(self._folder.iterdir()):
            if (folder / HEADER_FILE).exists():
                run = ShardRun(folder, self._recycled, self._config.keep_updates)
                self._runs[run.name] = run
                fields = {"run": run.name, "round": run.version, "num_updates": len(run.round.clients)}
                log.info("loaded a run", extra=fields)
        self._loaded = True

    def refresh(self) -> None:
        """Set the gauges to the current values."""
        for run in self._runs.values():
            self._metrics.version.labels(run.name).set(run.version)
        self._metrics.permits.set(self._permits.num_sending)
        self._metrics.waiting.set(self._permits.num_waiting)
        disk = shutil.disk_usage(self._config.data_dir)
        self._metrics.disk_free.set(disk.free)
        self._metrics.disk_size.set(disk.total)

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise UpdateRefused("starting", "the aggregator is still loading its runs: try again in a moment")

    def _run(self, name: str) -> ShardRun:
        self._check_loaded()
        try:
            return self._runs[name]
        except KeyError:
            known = ", ".join(sorted(self._runs)) or "none"
            raise UpdateRefused("unknown_run", f"there is no run '{name}' here; there are: {known}") from None

    def _lock(self, run: str) -> asyncio.Lock:
        """Held while a thread works on a run, and while its first model is received."""
        return self._locks.setdefault(run, asyncio.Lock())

    async def _locked(self, run: str, method: Callable[..., T], *arguments: Any) -> T:
        """Call a run's method in a thread, while nobody else works on the run."""
        async with self._lock(run):
            return await in_thread(method, *arguments)

    async def CreateModel(self, _requests: Any, context: Any) -> pb.CreateModelResponse:
        idle_seconds = self._config.idle_seconds
        header: pb.ModelHeader = await read_header(context, idle_seconds)
        describe_call(run=header.run)
        self._check_loaded()
        async with self._lock(header.run):
            try:
                model = await self._first_model(header)
            except UpdateRefused:
                await in_time(drain(context), idle_seconds)
                raise
            if model is None:
                await in_time(drain(context), idle_seconds)
            else:
                try:
                    await receive_payload(context, model, idle_seconds, ClientStream())
                    self._runs[header.run] = await in_thread(model.finish)
                finally:
                    model.close()
                log.info("new run", extra={"run": header.run, "model_bytes": model.num_bytes})
        return pb.CreateModelResponse(version=0)

    async def _first_model(self, header: pb.ModelHeader) -> FirstModel | None:
        """Where to put a run's first model; ``None`` if the same run exists already."""
        folder = self._folder / safe_name(header.run)
        files = (self._recycled, self._config.keep_updates)
        if header.run not in self._runs and (folder / HEADER_FILE).exists():
            # Its call was cancelled when all was written.
            self._runs[header.run] = await in_thread(ShardRun, folder, *files)
        if header.run not in self._runs:
            return await in_thread(FirstModel, folder, header, *files)
        if self._runs[header.run].header != header:
            raise UpdateRefused("conflict", f"run '{header.run}' exists with another model: rename the new run")
        return None

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> None:  # type: ignore[override]
        describe_call(run=request.run)
        async with self._downloads:
            num_bytes = await send_model(context, self._run(request.run), request, self._config.idle_seconds)
        self._metrics.download_bytes.inc(num_bytes)

    async def PutUpdate(self, _requests: Any, context: Any) -> None:  # type: ignore[override]
        header: pb.UpdateHeader = await read_header(context, self._config.idle_seconds)
        client = header.report.client
        await require_client(context, client)
        describe_call(run=header.run, round=header.report.round_num, client=client)
        outcome = "broken"
        try:
            async with self._permits.turn(header.run, client) as stream:
                is_new = await self._receive(header, stream, context)
            outcome = "accepted" if is_new else "duplicate"
        except UpdateRefused as refusal:
            self._metrics.refused.labels(refusal.reason).inc()
            outcome = "broken" if refusal.reason in BROKEN else "refused"
            raise
        finally:
            self._metrics.uploads.labels(outcome).inc()
        receipt = pb.UploadReceipt(digest=header.digest, duplicate=not is_new)
        await context.write(pb.PutUpdateResponse(receipt=receipt))

    async def _receive(self, header: pb.UpdateHeader, stream: ClientStream, context: Any) -> bool:
        """Receive an update, put it on disk and fold it; false if it counts already."""
        run = self._run(header.run)
        upload = await self._locked(run.name, run.examine, header)
        if upload is None:
            return False
        async with self._permits.permit(stream):
            part = await self._locked(run.name, run.begin, upload, header)
            if part is None:
                return False
            offset = part.received
            try:
                await context.write(pb.PutUpdateResponse(permit=pb.UploadPermit(offset=offset)))
                await receive_payload(context, part, self._config.idle_seconds, stream)
                await in_thread(part.sync)
                async with self._lock(run.name):
                    with self._metrics.folding.time():
                        return await in_thread(run.take, part)
            finally:
                self._metrics.upload_bytes.inc(part.received - offset)
                part.close()

    async def OpenRound(self, request: pb.OpenRoundRequest, _context: Any) -> pb.OpenRoundResponse:
        describe_call(run=request.run, round=request.round_num)
        run = self._run(request.run)
        await self._locked(run.name, run.open, request)
        return pb.OpenRoundResponse()

    async def SealRound(self, request: pb.SealRoundRequest, context: Any) -> None:  # type: ignore[override]
        describe_call(run=request.run, round=request.round_num)
        run = self._run(request.run)
        for answer in in_batches(await self._locked(run.name, run.seal, request.round_num)):
            await context.write(answer)

    async def CommitRound(self, request: pb.CommitRoundRequest, _context: Any) -> pb.CommitRoundResponse:
        fields = {"run": request.run, "round": request.round_num}
        describe_call(**fields)
        run = self._run(request.run)
        answer = await self._locked(run.name, run.commit, request.round_num, tuple(request.clients))
        self._metrics.committing.observe(answer.commit_seconds)
        seconds = {"fold_seconds": answer.fold_seconds, "commit_seconds": answer.commit_seconds}
        log.info("closed a round with %d updates", len(request.clients), extra={**fields, **seconds})
        return answer

    async def KeepVersion(self, request: pb.KeepVersionRequest, _context: Any) -> pb.KeepVersionResponse:
        describe_call(run=request.run)
        run = self._run(request.run)
        await self._locked(run.name, run.keep, request.version, request.label)
        return pb.KeepVersionResponse()
