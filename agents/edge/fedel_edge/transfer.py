"""Models down and updates up, tried again for as long as somebody waits for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fedel.errors import ServiceError
from fedel.types import Array
from fedel.wire.codec import report_from_pb
from fedel.wire.payload import Payload
from fedel.wire.retry import describe, is_transient, retrying
from fedel.wire.streams import Fetched, fetch_model, push_update
from fedel_edge.runs import Run
from fedel_edge.state import Parcel
from fedel_edge.worker import Worker

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sent:
    """What an upload took."""

    num_bytes: int
    wait_seconds: float


async def download(run: Run, version: int, worker: Worker) -> tuple[dict[str, Array], int]:
    """The model of this version and the bytes received; only what changed since the copy on disk travels."""
    have, model = await worker.run(partial(run.folder.model.load, run.trainer.spec))
    if have == version:
        return model, 0
    if have > version:
        have, model = -1, {}
    num_bytes = 0
    for index in range(len(run.shards)):
        fetched = await _insist(run, "download", partial(_fetch_part, run, index, version, have))
        model.update(fetched.tensors)
        num_bytes += fetched.num_bytes
    missing = [t.name for t in run.trainer.spec.tensors if t.name not in model]
    if missing:
        raise ServiceError(
            f"run '{run.name}': the aggregators sent no tensor '{missing[0]}' (and {len(missing) - 1} others) "
            f"of version {version}; are all of them running, with the shards the run was created with?"
        )
    await worker.run(partial(run.folder.model.save, version, model))
    return model, num_bytes


async def _fetch_part(run: Run, index: int, version: int, have: int) -> Fetched:
    return await fetch_model(run.shards[index].stub, run.name, version, have)


async def upload(run: Run, parcel: Parcel) -> Sent:
    """The update to every shard, each its own tensors; a shard without any hears so too."""
    sent = [await _upload_part(run, i, parcel, parcel.part(s.tensors)) for i, s in enumerate(run.shards)]
    return Sent(sum(s.num_bytes for s in sent), sum(s.wait_seconds for s in sent))


async def _upload_part(run: Run, index: int, parcel: Parcel, payload: Payload) -> Sent:
    begin = time.monotonic()
    permits: list[tuple[float, int]] = []

    def on_permit(offset: int) -> None:
        permits.append((time.monotonic() - begin, offset))

    report = report_from_pb(parcel.header.report)
    await _insist(
        run, "upload", lambda: push_update(run.shards[index].stub, run.name, report, payload, on_permit)
    )
    if not permits:
        return Sent(0, 0.0)  # it had been there before
    waited, offset = permits[0]
    return Sent(payload.num_bytes - offset, waited)


async def _insist(run: Run, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """Try until it succeeds or is refused for good. Cancelling gives up."""

    def log(error: Exception, failures: int) -> None:
        level = logging.WARNING if failures == 1 else logging.DEBUG
        _log.log(level, "%s of run '%s' broke (%s): trying again", what, run.name, describe(error))

    return await retrying(
        attempt, retried=lambda e: is_transient(e) or isinstance(e, ServiceError), on_failure=log
    )
