"""The coordinator's calls to the aggregators: to all shards at once, repeated until they answer."""

from __future__ import annotations

import logging
import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, TypeVar

import grpc
from grpc import aio

from fedel.errors import ServiceError
from fedel.roles.aggregator import HERE
from fedel.roles.events import Committed
from fedel.roles.gate import DIVERGED, clean
from fedel.security.tls import Tls
from fedel.types import Participant, Report
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.wire.channel import Dialer
from fedel.wire.codec import participant_to_pb, report_from_pb
from fedel.wire.fan_out import fan_out
from fedel.wire.retry import Backoff, describe, is_transient, retrying
from fedel.wire.streams import REASON

if TYPE_CHECKING:
    from fedel.v1.aggregator_pb2_grpc import AggregatorServiceAsyncStub

log = logging.getLogger(__name__)
T = TypeVar("T")
LONGEST_WAIT_SECONDS = 2.0
"""Between two tries: a run must go on soon after its aggregator is back."""


MAX_REASON = 300
"""Letters of an aggregator's answer that are shown."""
TOO_LARGE = "larger than max"
"""What gRPC says about a message that is larger than a receiver takes."""
END_TRIES = 5


class StoppedWaiting(Exception):
    """The run was stopped while an aggregator could not be reached."""


class OtherRound(ServiceError):
    """An aggregator is at a round at which it cannot be: it or the database was lost, or restored alone."""


@dataclass(frozen=True)
class OutageHandler:
    """What a call does while an aggregator does not answer."""

    show: Callable[[str], None]
    """Receives what to show to people; an empty text when the outage is over."""
    give_up: Callable[[], bool]
    """Whether to stop trying."""


class Shards:
    """All aggregators, in shard order."""

    def __init__(self, addresses: Sequence[str], tls: Tls | None = None) -> None:
        self.addresses = tuple(addresses)
        self._dialer = Dialer(tls, near=True)
        for address in addresses:
            self._dialer.tls.check(address)

    async def close(self) -> None:
        await self._dialer.close()

    def _stub(self, shard: int) -> AggregatorServiceAsyncStub:
        """Made for every call: the coordinator's certificate may have been renewed."""
        return AggregatorServiceStub(self._dialer.channel(self.addresses[shard]))

    async def newest_version(self, run: str, shard: int) -> int:
        """Version of a shard's newest model; one try, ``AioRpcError`` if it fails."""
        # Nothing has changed since version 0 itself, so for a fresh model the answer has no payload.
        call = self._stub(shard).GetModel(pb.GetModelRequest(run=run, version=-1, have_version=0))
        try:
            answer = await call.read()
        finally:
            call.cancel()
        if not isinstance(answer, pb.GetModelResponse):
            raise ServiceError(f"aggregator {self.addresses[shard]}: it ended GetModel without an answer")
        return answer.content.version

    async def open(
        self,
        run: str,
        round_num: int,
        participants: Sequence[Participant],
        outages: OutageHandler,
        attempt: int = 0,
    ) -> list[Report]:
        """Reports of a round that has made its model although the database does not know; else none."""
        request = pb.OpenRoundRequest(
            run=run,
            round_num=round_num,
            participants=map(participant_to_pb, participants),
            attempt=attempt,
        )
        answers = await self._all(lambda i: self._stub(i).OpenRound(request), outages)
        return await self.seal(run, round_num, outages) if all(each.made for each in answers) else []

    async def seal(self, run: str, round_num: int, outages: OutageHandler) -> list[Report]:
        """Reports of the clients whose update every shard has, by client."""
        request = pb.SealRoundRequest(run=run, round_num=round_num)

        async def seal(shard: int) -> dict[str, Report]:
            answers = self._stub(shard).SealRound(request)
            return {r.client: report_from_pb(r) async for answer in answers for r in answer.reports}

        held = await self._all(seal, outages)
        everywhere = reduce(operator.and_, (reports.keys() for reports in held))
        return [held[0][client] for client in sorted(everywhere)]

    async def commit(
        self,
        run: str,
        round_num: int,
        clients: Sequence[str],
        outages: OutageHandler,
        unmask: pb.Unmask | None = None,
    ) -> Committed:
        request = pb.CommitRoundRequest(run=run, round_num=round_num, clients=clients, unmask=unmask)
        answers = await self._all(lambda i: self._stub(i).CommitRound(request), outages)
        importance: dict[str, float] = {}
        num_clients: dict[str, int] = {}
        for answer in answers:
            importance.update(zip(answer.tensors, answer.global_importance, strict=True))
            num_clients.update(zip(answer.tensors, answer.num_clients, strict=True))
        return Committed(
            round_num=round_num,
            version=answers[0].version,
            global_importance=importance,
            num_clients=num_clients,
            fold_seconds=max(answer.fold_seconds for answer in answers),
            commit_seconds=max(answer.commit_seconds for answer in answers),
        )

    async def keep(self, run: str, version: int, label: str, outages: OutageHandler) -> None:
        request = pb.KeepVersionRequest(run=run, version=version, label=label)
        await self._all(lambda i: self._stub(i).KeepVersion(request), outages)

    async def end(self, run: str) -> None:
        """Tell the aggregators that the run is over, so that they take nothing of it any more."""
        request = pb.EndRunRequest(run=run)
        await self._all(lambda i: self._stub(i).EndRun(request), self._few_tries())

    async def delete(self, run: str, dry_run: bool) -> int:
        """Delete everything of a run, or only look; how many bytes it is at all aggregators together."""
        request = pb.DeleteRunRequest(run=run, dry_run=dry_run)
        answers = await self._all(lambda i: self._stub(i).DeleteRun(request), self._few_tries())
        return sum(answer.num_bytes for answer in answers)

    def _few_tries(self) -> OutageHandler:
        """For what can wait for another day."""
        failures = 0

        def give_up() -> bool:
            nonlocal failures
            failures += 1
            return failures > END_TRIES * len(self.addresses)

        return OutageHandler(lambda _: None, give_up)

    async def _all(self, call: Callable[[int], Awaitable[T]], outages: OutageHandler) -> list[T]:
        """Every shard's answer. Every call may be repeated: the aggregator gives the same answer again."""
        return await fan_out(self._answer(call, i, outages) for i in range(len(self.addresses)))

    async def _answer(self, call: Callable[[int], Awaitable[T]], shard: int, outages: OutageHandler) -> T:
        address = self.addresses[shard]

        def on_failure(error: Exception, _failures: int) -> None:
            if outages.give_up():
                raise StoppedWaiting from None
            outages.show(f"aggregator {address} {_trouble(error)}; trying again until it does")

        backoff = Backoff(LONGEST_WAIT_SECONDS)
        try:
            answer = await retrying(lambda: call(shard), retried=passes, on_failure=on_failure, backoff=backoff)
        except aio.AioRpcError as error:
            if reason_of(error) == "other_round":
                raise OtherRound(clean(describe(error).replace(HERE, f"aggregator {address}", 1))) from error
            raise ServiceError(refusal(address, error)) from error
        if backoff.failures:
            outages.show("")
        return answer


def passes(error: Exception) -> bool:
    """Whether a call may succeed when it is repeated; a message that is too large stays too large."""
    return is_transient(error) and TOO_LARGE not in describe(error)


def _trouble(error: Exception) -> str:
    code = error.code().name if isinstance(error, aio.AioRpcError) else type(error).__name__
    return f"does not answer as it should ({code}: {clean(describe(error), MAX_REASON)})"


def refusal(address: str, error: aio.AioRpcError) -> str:
    reason, text = reason_of(error), clean(describe(error), MAX_REASON)
    hint = ""
    if error.code() is grpc.StatusCode.NOT_FOUND:
        hint = "; has its data directory been lost or changed?"
    elif reason == "not_finite":
        hint = f"; {DIVERGED}: stop the run and start another with a lower work.lr"
    return f"aggregator {address} refused with {error.code().name}: {text}{hint}"


def reason_of(error: aio.AioRpcError) -> str:
    """The one word that a service of FedEL sends with a refusal; empty from others."""
    return next((str(value) for key, value in error.trailing_metadata() or () if key == REASON), "")
