"""Models down and updates up, all shards at the same time, tried again until they arrive or are given up.

``dialer`` has the connections of the task or test that the transfer is of."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import TypeVar

import grpc
from grpc import aio

from fedel.errors import ServiceError
from fedel.roles.gate import clean
from fedel.types import Array
from fedel.wire.channel import Dialer
from fedel.wire.codec import report_from_pb
from fedel.wire.fan_out import fan_out
from fedel.wire.retry import Backoff, describe, retrying
from fedel.wire.streams import Fetched, Pushed, fetch_model, push_update, reason_of
from fedel_edge.joined_runs import JoinedRun, Shard
from fedel_edge.run_folder import StoredUpdate
from fedel_edge.worker import Worker

T = TypeVar("T")
_log = logging.getLogger(__name__)
FINAL = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.ABORTED,
    )
)
"""How an aggregator says that this will not do however often it is sent: a wrong shape, too late, not planned,
another process of the same name. Everything else may pass (a full disk, a lack of descriptors, a restart): it
is tried again until the round is closed. What was damaged in transit (DATA_LOSS) is sent again once."""
_SLOW_FAILURES = 8
"""What needs people is tried as rarely as something that has failed this often."""


async def download(
    run: JoinedRun, dialer: Dialer, version: int, worker: Worker, needed: Collection[str] | None = None
) -> tuple[dict[str, Array], int]:
    """The tensors of this version that are ``needed``, or all, and the bytes received: what is in the copy on
    disk, and has not changed since, is not sent."""
    spec, copy = run.trainer.spec, run.folder.model
    names = [t.name for t in spec.tensors if needed is None or t.name in needed]
    versions, model = await worker.run(partial(copy.load, spec, names))
    held = {name: versions.get(name, -1) for name in names if versions.get(name) != version}
    if not held:
        return {name: model[name] for name in names}, 0
    for name in [name for name, have in held.items() if have > version]:
        held[name] = -1
        del model[name]
    parts = await fan_out(_download_part(run, dialer, index, version, held) for index in range(len(run.shards)))
    new = {name: values for part in parts for name, values in part.tensors.items()}
    model.update(new)
    missing = [name for name in names if name not in model]
    if missing:
        raise ServiceError(
            f"run '{run.name}': the aggregators did not send tensor '{missing[0]}' (and {len(missing) - 1} "
            f"others) of version {version}; are all of them running, with the shards the run was created with?"
        )
    versions.update(dict.fromkeys(names, version))
    await worker.run(partial(copy.save, spec, versions, model, new))
    return {name: model[name] for name in names}, sum(part.num_bytes for part in parts)


async def download_tested(run: JoinedRun, dialer: Dialer, version: int, worker: Worker) -> dict[str, Array]:
    """What a test of this version is of: the average over versions, where the run keeps one. The average is not
    kept on disk, since every version changes it."""
    averaged: dict[str, Array] = {}
    if run.config.server.average:
        parts = await fan_out(_average_part(run, dialer, index, version) for index in range(len(run.shards)))
        averaged = {name: values for part in parts for name, values in part.tensors.items()}
    names = [t.name for t in run.trainer.spec.tensors]
    plain, _ = await download(run, dialer, version, worker, set(names) - averaged.keys())
    return {name: averaged[name] if name in averaged else plain[name] for name in names}


async def _average_part(run: JoinedRun, dialer: Dialer, index: int, version: int) -> Fetched:
    def fetch() -> Awaitable[Fetched]:
        stub = run.shards[index].stub(dialer)
        return fetch_model(stub, run.name, version, spec=run.trainer.spec, average=True)

    return await retry_until_answered(run, "download", fetch)


async def _download_part(
    run: JoinedRun, dialer: Dialer, index: int, version: int, held: Mapping[str, int]
) -> Fetched:
    def fetch() -> Awaitable[Fetched]:
        return _fetch(run, dialer, run.shards[index], version, held)

    return await retry_until_answered(run, "download", fetch)


async def _fetch(
    run: JoinedRun, dialer: Dialer, shard: Shard, version: int, held: Mapping[str, int]
) -> Fetched:
    """One shard's part; it is not asked if nothing of it is needed."""
    part = {name: have for name, have in held.items() if not shard.tensors or name in shard.tensors}
    if not part:
        return Fetched(version, {}, 0)
    return await fetch_model(shard.stub(dialer), run.name, version, spec=run.trainer.spec, held=part)


async def upload(run: JoinedRun, dialer: Dialer, update: StoredUpdate) -> tuple[int, float]:
    """Send every shard its own tensors; one without any is sent an empty update.

    Returns the number of bytes sent, and the seconds until the last shard permitted it.
    """
    sent = await fan_out(_upload_part(run, dialer, index, update) for index in range(len(run.shards)))
    return sum(part.num_bytes for part in sent), max((part.wait_seconds for part in sent), default=0.0)


async def _upload_part(run: JoinedRun, dialer: Dialer, index: int, update: StoredUpdate) -> Pushed:
    report, pushed = report_from_pb(update.header.report), Pushed()

    async def attempt() -> Pushed:
        shard = run.shards[index]
        part, stub = update.part(shard.tensors), shard.stub(dialer)
        return await push_update(stub, run.name, report, part, pushed, update.header.attempt)

    return await retry_until_answered(run, "upload", attempt)


async def retry_until_answered(run: JoinedRun, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """Try until it succeeds or is refused for good. Cancelling gives up."""
    backoff, damaged = Backoff(), 0

    def retried(error: Exception) -> bool:
        nonlocal damaged
        if not isinstance(error, aio.AioRpcError):
            return isinstance(error, ServiceError)
        if error.code() is grpc.StatusCode.DATA_LOSS:
            damaged += 1
            return damaged == 1
        return error.code() not in FINAL

    def log(error: Exception, failures: int) -> None:
        if isinstance(error, aio.AioRpcError) and _needs_people(error):
            backoff.failures = max(failures, _SLOW_FAILURES)
        level = logging.WARNING if failures == 1 else logging.DEBUG
        said = clean(describe(error))
        _log.log(level, "%s of run '%s' broke (%s): trying again", what, run.name, said)

    return await retrying(attempt, retried=retried, on_failure=log, backoff=backoff, sleep=run.sleep)


def _needs_people(error: aio.AioRpcError) -> bool:
    """Whether it takes longer than a moment: a run that is set aside, a certificate that is to be renewed."""
    return reason_of(error) == "damaged" or error.code() is grpc.StatusCode.UNAUTHENTICATED
