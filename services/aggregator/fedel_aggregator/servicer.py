"""AggregatorService: the gRPC side of the runs.

The order of an upload is in ``PutUpdate`` and ``_receive``; what the runs do with it is in ``run.py``.
"""

from __future__ import annotations

import logging
import shutil
from typing import Any

from fedel_services.errors import describe_call
from fedel_services.guard import caller, require_client
from fedel_services.job_code import FolderShelf
from fedel_services.threads import in_thread
from prometheus_client import CollectorRegistry

from fedel.errors import UpdateRefused
from fedel.roles.gate import objection_to_name
from fedel.telemetry import AggregatorMetrics
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1 import aggregator_pb2_grpc
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.errors import Damaged
from fedel_aggregator.limits import Pace, Shares
from fedel_aggregator.permits import ClientStream, UploadPermits
from fedel_aggregator.run import ShardRun
from fedel_aggregator.runs import Runs
from fedel_aggregator.shared_reads import SharedReads
from fedel_aggregator.streams import (
    drain,
    heard_out,
    in_batches,
    in_time,
    read_header,
    receive_payload,
    send_model,
)

log = logging.getLogger("fedel.aggregator")
BROKEN = ("superseded", "idle", "slow")
"""Refusals that only mean that a connection is gone."""


class Aggregator(aggregator_pb2_grpc.AggregatorServiceServicer):
    """The calls of an aggregator."""

    def __init__(self, config: AggregatorConfig, registry: CollectorRegistry) -> None:
        self._config, self.registry = config, registry
        self._metrics = AggregatorMetrics(registry)
        self._permits = UploadPermits(config.max_uploads)
        self._downloads = Shares(config.max_downloads, config.max_downloads_per_client)
        self.reads = SharedReads()
        self._runs = Runs(config.data_dir, config.keep_updates, config.code)

    @property
    def shelf(self) -> FolderShelf:
        """Code that came with jobs."""
        return self._runs.shelf

    def load(self) -> None:
        """Continue every run where it was."""
        self._runs.load()

    def refresh(self) -> None:
        """Set the gauges to the current values."""
        for run in self._runs.all():
            self._metrics.version.labels(run.name).set(run.version)
        self._metrics.permits.set(self._permits.num_sending)
        self._metrics.waiting.set(self._permits.num_waiting)
        disk = shutil.disk_usage(self._config.data_dir)
        self._metrics.disk_free.set(disk.free)
        self._metrics.disk_size.set(disk.total)

    def _pace(self) -> Pace:
        return Pace(self._config.idle_seconds, self._config.min_bytes_per_second)

    async def CreateModel(self, _requests: Any, context: Any) -> pb.CreateModelResponse:
        idle_seconds = self._config.idle_seconds
        header: pb.ModelHeader = await read_header(context, idle_seconds)
        describe_call(run=header.run)
        async with heard_out(context, idle_seconds):
            self._runs.check(header.run)
        async with self._runs.lock(header.run):
            async with heard_out(context, idle_seconds):
                model = await self._runs.first_model(header)
            if model is None:
                await in_time(drain(context), idle_seconds)
            else:
                try:
                    await receive_payload(context, model, self._pace())
                    await self._runs.finish(model)
                finally:
                    model.close()
                log.info("new run", extra={"run": header.run, "model_bytes": model.num_bytes})
        return pb.CreateModelResponse(version=0)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> None:  # type: ignore[override]
        describe_call(run=request.run)
        run, known = await self._runs.find(request.run), caller()
        who = str(known.facts.identity) if known else context.peer()
        async with self._downloads.place(who) as make_room:
            try:
                num_bytes = await send_model(context, run, request, self._pace(), self.reads, make_room)
            except Damaged as error:
                if request.version in (-1, run.version):
                    self._runs.set_aside(run.name, error)
                raise
        self._metrics.download_bytes.inc(num_bytes)

    async def PutUpdate(self, _requests: Any, context: Any) -> None:  # type: ignore[override]
        header: pb.UpdateHeader = await read_header(context, self._config.idle_seconds)
        client, outcome = header.report.client, "broken"
        describe_call(run=header.run, round=header.report.round_num, client=client)
        if objection := objection_to_name(client, "name of the client"):
            raise UpdateRefused("header", objection)
        await require_client(context, client)
        try:
            await self._runs.find(header.run)
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
        run = header.run
        upload = await self._runs.use(run, ShardRun.examine, header)
        if upload is None:
            return False
        async with self._permits.permit(upload.client, stream):
            part = await self._runs.use(run, ShardRun.begin, upload, header)
            if part is None:
                return False
            offset = part.received
            try:
                await context.write(pb.PutUpdateResponse(permit=pb.UploadPermit(offset=offset)))
                await receive_payload(context, part, self._pace(), stream)
                await in_thread(part.sync)
                with self._metrics.folding.time():
                    return await self._runs.use(run, ShardRun.take, part)
            finally:
                self._metrics.upload_bytes.inc(part.received - offset)
                part.close()

    async def OpenRound(self, request: pb.OpenRoundRequest, _context: Any) -> pb.OpenRoundResponse:
        describe_call(run=request.run, round=request.round_num)
        return pb.OpenRoundResponse(made=not await self._runs.use(request.run, ShardRun.open, request))

    async def SealRound(self, request: pb.SealRoundRequest, context: Any) -> None:  # type: ignore[override]
        describe_call(run=request.run, round=request.round_num)
        for answer in in_batches(await self._runs.use(request.run, ShardRun.seal, request.round_num)):
            await context.write(answer)

    async def CommitRound(self, request: pb.CommitRoundRequest, _context: Any) -> pb.CommitRoundResponse:
        fields = {"run": request.run, "round": request.round_num}
        describe_call(**fields)
        clients = tuple(request.clients)
        unmask = request.unmask if request.HasField("unmask") else None
        answer = await self._runs.use(request.run, ShardRun.commit, request.round_num, clients, unmask)
        self._metrics.committing.observe(answer.commit_seconds)
        seconds = {"fold_seconds": answer.fold_seconds, "commit_seconds": answer.commit_seconds}
        log.info("closed a round with %d updates", len(clients), extra={**fields, **seconds})
        return answer

    async def KeepVersion(self, request: pb.KeepVersionRequest, _context: Any) -> pb.KeepVersionResponse:
        describe_call(run=request.run)
        await self._runs.use(request.run, ShardRun.keep, request.version, request.label)
        return pb.KeepVersionResponse()

    async def EndRun(self, request: pb.EndRunRequest, _context: Any) -> pb.EndRunResponse:
        describe_call(run=request.run)
        await self._runs.use(request.run, ShardRun.end)
        return pb.EndRunResponse()

    async def DeleteRun(self, request: pb.DeleteRunRequest, _context: Any) -> pb.DeleteRunResponse:
        describe_call(run=request.run)
        num_bytes = await self._runs.delete(request.run, request.dry_run)
        if not request.dry_run:
            self._metrics.version.remove_by_labels({"run": request.run})
            log.info("deleted a run", extra={"run": request.run, "num_bytes": num_bytes})
        return pb.DeleteRunResponse(num_bytes=num_bytes)
