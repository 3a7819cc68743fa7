"""Bringing a run to a federation and following it there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
from grpc import aio
from safetensors.numpy import save_file

from fedel.errors import ServiceError
from fedel.job import RunConfig
from fedel.roles.sharding import assign
from fedel.security.tls import Tls
from fedel.types import Array, ModelSpec, Tensors
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import RETRIED, backoff_seconds, connect
from fedel.wire.codec import spec_to_pb
from fedel.wire.streams import fetch_model, model_header, push_model

T = TypeVar("T")


async def create(
    address: str, run: str, job: RunConfig, spec: ModelSpec, tensors: Tensors, tls: Tls | None = None
) -> None:
    """Bring the first model to every aggregator, then create the run at the coordinator."""
    async with connect(address, tls) as channel:
        coordinator = CoordinatorServiceStub(channel)
        shards = (await _asked(address, coordinator.ListAggregators(pb.ListAggregatorsRequest()))).addresses
        header = model_header(run, dict(job.strategy), spec, job.rounds.keep_every, job.rounds.late)
        for shard, names in zip(shards, assign(spec, len(shards)), strict=True):
            async with connect(shard, tls) as bulk:
                stub = AggregatorServiceStub(bulk)
                await _asked(shard, push_model(stub, header, {n: tensors[n] for n in names or spec.by_name}))
        request = pb.CreateRunRequest(run=run, config_json=json.dumps(job.table()), spec=spec_to_pb(spec))
        await _asked(address, coordinator.CreateRun(request))


async def follow(
    address: str, run: str, show: Callable[[pb.RunStatus], None], tls: Tls | None = None
) -> pb.RunStatus:
    """Show every change until the run is over; a coordinator that restarts is waited for."""
    status = pb.RunStatus()
    async for status in _statuses(address, run, tls):
        show(status)
    return status


async def _statuses(address: str, run: str, tls: Tls | None) -> AsyncIterator[pb.RunStatus]:
    attempt, seen = 0, 0
    async with connect(address, tls) as channel:
        stub = CoordinatorServiceStub(channel)
        while True:
            try:
                skip = seen
                async for answer in stub.WatchRun(pb.WatchRunRequest(run=run)):
                    attempt, status = 0, answer.status
                    # After a restart the coordinator tells all rounds again; show those that are new.
                    fresh = list(status.rounds_json)
                    again, skip = fresh[:skip], max(0, skip - len(fresh))
                    del status.rounds_json[: len(again)]
                    seen += len(status.rounds_json)
                    yield status
                return
            except aio.AioRpcError as error:
                if error.code() not in RETRIED:
                    raise ServiceError(f"{address}: {error.details()}") from None
                await asyncio.sleep(backoff_seconds(attempt, longest=5))
                attempt += 1


async def control(
    address: str, run: str, action: pb.RunAction.ValueType, tls: Tls | None = None
) -> pb.RunStatus:
    async with connect(address, tls) as channel:
        stub = CoordinatorServiceStub(channel)
        answer = await _asked(address, stub.ControlRun(pb.ControlRunRequest(run=run, action=action)))
        return answer.status


async def list_runs(address: str, tls: Tls | None = None) -> list[pb.RunStatus]:
    async with connect(address, tls) as channel:
        stub = CoordinatorServiceStub(channel)
        return list((await _asked(address, stub.ListRuns(pb.ListRunsRequest()))).runs)


async def save_model(address: str, run: str, path: Path, tls: Tls | None = None) -> None:
    """Write the newest model of a run as safetensors."""
    tensors: dict[str, Array] = {}
    async with connect(address, tls) as channel:
        stub = CoordinatorServiceStub(channel)
        shards = (await _asked(address, stub.ListAggregators(pb.ListAggregatorsRequest()))).addresses
    for shard in shards:
        async with connect(shard, tls) as bulk:
            tensors.update((await _asked(shard, fetch_model(AggregatorServiceStub(bulk), run))).tensors)
    save_file(dict(tensors), path)


async def _asked(address: str, call: Awaitable[T]) -> T:
    """The answer to a call, or an error that says who was asked and what to look at."""
    try:
        return await call
    except aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            raise ServiceError(
                f"cannot reach {address}: {error.details()}; is the service running, is this its address, and"
                " does it take your certificate (--certs)?"
            ) from None
        raise ServiceError(f"{address} refused: {error.details()}") from None
