"""Creating a run in a federation and following it there."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc import aio
from safetensors.numpy import save_file

from fedel.errors import ServiceError
from fedel.files import TEMPORARY
from fedel.job import RunConfig
from fedel.roles.sharding import assign
from fedel.security.tls import Tls
from fedel.types import Array, ModelSpec, Tensors
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.code_pb2 import StoredCode
from fedel.v1.code_pb2_grpc import CodeServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.code import push
from fedel.wire.codec import spec_to_pb
from fedel.wire.retry import Backoff, describe, mistake, retrying
from fedel.wire.streams import fetch_model, model_header, push_model
from fedel.wire.watch import whole

T = TypeVar("T")
DOWNLOAD_TRIES = 5
MAX_INPUT_BYTES = 500_000
"""A longer text about the model's input (a vocabulary of many words) stays at the desk."""
LAST_ROUNDS = 3
"""The newest two may still wait for their test."""


@dataclass(frozen=True)
class CodeToSend:
    """The code of a job, signed."""

    stored: StoredCode
    has_method: bool
    """The method is in it, which servers have to run too."""

    @property
    def sha256(self) -> str:
        return self.stored.header.sha256


async def create(
    address: str,
    run: str,
    job: RunConfig,
    spec: ModelSpec,
    tensors: Tensors,
    tls: Tls | None = None,
    code: CodeToSend | None = None,
    input_json: str = "",
) -> None:
    """Send the code, if any, and the first model to every aggregator, then create the run.

    ``input_json`` says what the model takes; the coordinator keeps it for those who fetch the result.
    """
    method_in = code.sha256 if code and code.has_method else ""
    async with connect(address, tls) as channel:
        if code is not None:
            await _answer_of(address, push(CodeServiceStub(channel), code.stored), tls)
        coordinator = CoordinatorServiceStub(channel)
        shards = (
            await _answer_of(address, coordinator.ListAggregators(pb.ListAggregatorsRequest()), tls)
        ).addresses
        header = model_header(
            run,
            dict(job.strategy),
            spec,
            job.rounds.keep_every,
            job.rounds.late,
            asdict(job.protection),
            asdict(job.upload),
            asdict(job.server),
            job.rounds.max_staleness,
            job.rounds.staleness_power,
            method_in,
        )
        for shard, names in zip(shards, assign(spec, len(shards)), strict=True):
            async with connect(shard, tls) as bulk:
                stub = AggregatorServiceStub(bulk)
                if code is not None and method_in:
                    await _answer_of(shard, push(CodeServiceStub(bulk), code.stored), tls)
                part = {name: tensors[name] for name in names or spec.by_name}
                await _answer_of(shard, push_model(stub, header, part), tls)
        request = pb.CreateRunRequest(
            run=run,
            config_json=json.dumps(job.table_to_send()),
            spec=spec_to_pb(spec),
            input_json=input_json if len(input_json.encode()) <= MAX_INPUT_BYTES else "",
        )
        await _answer_of(address, coordinator.CreateRun(request), tls)


async def follow(
    address: str, run: str, show: Callable[[pb.RunStatus], None], tls: Tls | None = None
) -> pb.RunStatus:
    """Show every change until the run is over; wait for a coordinator that restarts."""
    status, seen, backoff = pb.RunStatus(), 0, Backoff(longest_seconds=5.0)
    async with connect(address, tls) as channel:
        stub = CoordinatorServiceStub(channel)

        async def watch() -> None:
            nonlocal status, seen
            skip = seen
            async for status in whole(stub.WatchRun(pb.WatchRunRequest(run=run))):
                backoff.reset()
                # After a restart the coordinator sends all rounds again; show those that are new.
                fresh = list(status.rounds_json)
                again, skip = fresh[:skip], max(0, skip - len(fresh))
                del status.rounds_json[: len(again)]
                seen += len(status.rounds_json)
                show(status)

        try:
            await retrying(watch, backoff=backoff)
        except aio.AioRpcError as error:
            raise ServiceError(f"{address} refused to report on run '{run}': {describe(error)}") from None
    return status


async def control(
    address: str, run: str, action: pb.RunAction.ValueType, tls: Tls | None = None, why: str = ""
) -> pb.RunStatus:
    async with connect(address, tls) as channel:
        request = pb.ControlRunRequest(run=run, action=action, why=why)
        return (await _answer_of(address, CoordinatorServiceStub(channel).ControlRun(request), tls)).status


async def delete(
    address: str, runs: Sequence[str], older_than_seconds: float | None, dry_run: bool, tls: Tls | None = None
) -> list[pb.DeletedRun]:
    """Delete runs that are over, here and at the aggregators; what was deleted."""
    async with connect(address, tls) as channel:
        request = pb.DeleteRunsRequest(runs=runs, older_than_seconds=older_than_seconds, dry_run=dry_run)
        return list((await _answer_of(address, CoordinatorServiceStub(channel).DeleteRuns(request), tls)).runs)


async def result_of(address: str, run: str, tls: Tls | None = None) -> pb.GetResultResponse:
    """The result of a run that is over, and what its model takes."""
    async with connect(address, tls) as channel:
        request = pb.GetResultRequest(run=run)
        return await _answer_of(address, CoordinatorServiceStub(channel).GetResult(request), tls)


async def list_runs(address: str, tls: Tls | None = None) -> list[pb.RunStatus]:
    """All runs, newest first, without their clients."""
    return list((await overview(address, tls)).runs)


async def overview(address: str, tls: Tls | None = None) -> pb.ListRunsResponse:
    """All runs, newest first, without their clients, and the agents that are connected."""
    found = pb.ListRunsResponse()
    async with connect(address, tls) as channel:
        stub = CoordinatorServiceStub(channel)
        while True:
            page = await _answer_of(address, stub.ListRuns(pb.ListRunsRequest(offset=len(found.runs))), tls)
            found.runs.extend(page.runs)
            if not page.more:
                found.num_agents = page.num_agents
                found.agents.extend(page.agents)
                return found


async def list_agents(
    address: str, selector: str = "", name: str = "", tls: Tls | None = None
) -> tuple[list[pb.AgentStatus], float]:
    """All agents by name, or the one of this name, and the coordinator's time."""
    found: list[pb.AgentStatus] = []
    async with connect(address, tls) as channel:
        stub = CoordinatorServiceStub(channel)
        while True:
            after = found[-1].name if found else ""
            request = pb.ListAgentsRequest(selector=selector, name=name, after=after)
            page = await _answer_of(address, stub.ListAgents(request), tls)
            found += page.agents
            if not page.more:
                return found, page.now


async def control_agent(
    address: str, request: pb.ControlAgentRequest, tls: Tls | None = None
) -> pb.AgentStatus:
    async with connect(address, tls) as channel:
        stub = CoordinatorServiceStub(channel)
        return (await _answer_of(address, stub.ControlAgent(request), tls)).status


async def plan_run(
    address: str,
    job: RunConfig,
    spec: ModelSpec,
    wait_seconds: float,
    tls: Tls | None = None,
    code: CodeToSend | None = None,
) -> str:
    """What the first rounds of a job would be on the agents that are connected, as JSON."""
    async with connect(address, tls) as channel:
        if code is not None:
            await _answer_of(address, push(CodeServiceStub(channel), code.stored), tls)
        request = pb.PlanRunRequest(
            config_json=json.dumps(job.table_to_send()), spec=spec_to_pb(spec), wait_seconds=wait_seconds
        )
        return (await _answer_of(address, CoordinatorServiceStub(channel).PlanRun(request), tls)).plan_json


async def look(address: str, run: str, tls: Tls | None = None) -> pb.RunStatus | None:
    """One run with its clients and its last rounds; without a name the newest active one, if there is any."""

    async def first() -> pb.RunStatus | None:
        async with connect(address, tls) as channel:
            request = pb.WatchRunRequest(run=run, first_round=-LAST_ROUNDS)
            statuses = whole(CoordinatorServiceStub(channel).WatchRun(request))
            try:
                return await anext(statuses)
            except aio.AioRpcError as error:
                if run or error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                return None

    return await _answer_of(address, first(), tls)


async def save_model(address: str, run: str, path: Path, tls: Tls | None = None, version: int = -1) -> None:
    """Write a version of a run's model, or its newest, as safetensors; its average, where the run has one.

    The file is there when it is whole. A connection that breaks is tried again."""
    tensors: dict[str, Array] = {}
    async with connect(address, tls) as channel:
        stub = CoordinatorServiceStub(channel)
        shards = (await _answer_of(address, stub.ListAggregators(pb.ListAggregatorsRequest()), tls)).addresses
    for shard in shards:
        async with connect(shard, tls) as bulk:
            aggregator = AggregatorServiceStub(bulk)
            found = await _answer_of(shard, _patiently(fetch_model, aggregator, run, version), tls)
            average = _patiently(fetch_model, aggregator, run, found.version, average=True)
            averaged = await _answer_of(shard, average, tls)
            tensors |= found.tensors | averaged.tensors
    part = path.with_name(f".{path.name}{TEMPORARY}")
    save_file(dict(tensors), part)
    part.replace(path)


async def _patiently(call: Callable[..., Awaitable[T]], *what: Any, **how: Any) -> T:
    """A download, begun again if its connection breaks; given up after a few tries."""

    def on_failure(error: Exception, failures: int) -> None:
        if failures >= DOWNLOAD_TRIES:
            raise error

    return await retrying(lambda: call(*what, **how), on_failure=on_failure, backoff=Backoff(5.0))


async def _answer_of(address: str, call: Awaitable[T], tls: Tls | None) -> T:
    """The answer to a call, or an error that names the server and what to check."""
    try:
        return await call
    except aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.UNAVAILABLE and not mistake(error):
            raise ServiceError(f"cannot reach {address}: {_what_to_check(tls)} ({describe(error)})") from None
        verb = "" if mistake(error) else " refused"
        raise ServiceError(f"{address}{verb}: {describe(error)}") from None


def _what_to_check(tls: Tls | None) -> str:
    if tls is not None and tls.secure:
        return f"is the service running, is this its address, and does it accept the certificate in {tls.dir}?"
    return (
        "no certificate was given (--certs, $FEDEL_CERTS), and a server that requires one ends the connection"
        " without a word. If it requires none: is the service running, and is this its address?"
    )
