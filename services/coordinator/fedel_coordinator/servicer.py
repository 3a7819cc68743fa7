"""The coordinator's gRPC service: agents' sessions, and the calls with which people run and watch runs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
from fedel_services.guard import require_client
from fedel_services.runtime import refuse
from grpc import aio

from fedel.errors import ConfigError, FedelError, ServiceError
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from fedel.wire.codec import spec_from_pb
from fedel_coordinator import status
from fedel_coordinator.coordinator import Coordinator, ModelMissing, NameTaken
from fedel_coordinator.fleet import Device
from fedel_coordinator.fleet import Session as AgentSession
from fedel_coordinator.run import ENDED, Run
from fedel_coordinator.store import RunRow, StoreUnavailable

log = logging.getLogger(__name__)

REST_SECONDS = 0.1
"""A follower hears of changes at most this often."""
BATCH_BYTES = 1024 * 1024
BATCH_ROUNDS = 200
MAX_CLIENT_NAME = 200


class CoordinatorServicer(CoordinatorServiceServicer):
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.counts: Counter[str] = Counter()

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Hears and speaks at the same time; speaking ends when hearing does."""
        hello = await _hello(request_iterator, context)
        await require_client(context, hello.client)
        device = Device(hello.device.device_type, hello.device.memory_bytes, hello.device.agent_version)
        session = self._coordinator.fleet.open(hello.client, device)
        hearing = asyncio.create_task(self._hear(session, request_iterator))
        try:
            welcome = pb.Welcome(heartbeat_seconds=self._coordinator.config.heartbeat_seconds)
            await context.write(pb.SessionResponse(welcome=welcome))
            for offer in self._coordinator.offers():
                session.push(offer)
            async for message in session.messages():
                await context.write(message)
            await self._part(session, hearing, context)
        finally:
            hearing.cancel()
            self._coordinator.fleet.close(session)
            for name in session.joined:
                self._coordinator.runs[name].disconnected(session.client)

    async def _part(self, session: AgentSession, hearing: asyncio.Task[None], context: Any) -> None:
        """End a stream the way it deserves."""
        client = session.client
        if session.superseded:
            self.counts["superseded"] += 1
            self._coordinator.metrics.refused.labels("superseded").inc()
            await refuse(
                context,
                grpc.StatusCode.ALREADY_EXISTS,
                f"another agent opened a session as client '{client}': give every agent a name of its own",
                "superseded",
            )
        elif hearing.done() and (error := hearing.exception()) is not None:
            if isinstance(error, StoreUnavailable):
                await refuse(context, grpc.StatusCode.UNAVAILABLE, str(error), "store")
            log.error("session of %s failed", client, exc_info=error, extra={"client": client})
            await refuse(context, grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}", "internal")
        elif hearing.done():
            # A stream that broke looks like one that was closed, until something is written to it.
            await context.write(pb.SessionResponse())
            log.info("client %s left", client, extra={"client": client})
            for name in session.joined:
                await self._coordinator.runs[name].left(client)

    async def _hear(self, session: AgentSession, requests: Any) -> None:
        try:
            async for request in requests:
                if not session.superseded:
                    self._heard(session)
                    await self._take(session, request)
        finally:
            session.end()

    def _heard(self, session: AgentSession) -> None:
        was_present = self._coordinator.fleet.present(session.client)
        self._coordinator.fleet.heard(session.client)
        if not was_present:
            for name in session.joined:
                self._coordinator.runs[name].news.notify()

    async def _take(self, session: AgentSession, request: pb.SessionRequest) -> None:
        kind = request.WhichOneof("kind")
        if kind is None or kind in ("hello", "heartbeat"):
            self.counts["heartbeats"] += kind == "heartbeat"
            self._coordinator.metrics.heartbeats.inc(kind == "heartbeat")
            return
        message = getattr(request, kind)
        run = self._coordinator.runs.get(message.run)
        if run is None:
            self.counts["unknown_run"] += 1
            self._coordinator.metrics.refused.labels("unknown_run").inc()
            reason = f"this coordinator has no live run '{message.run}': wait for an offer"
            session.push(pb.SessionResponse(refused=pb.JoinRefused(run=message.run, reason=reason)))
        elif isinstance(message, pb.Join):
            await run.joined(session, message)
        elif isinstance(message, pb.TaskAnswer):
            run.answered(session.client, message)
        elif isinstance(message, pb.TaskProgress):
            run.progressed(session.client, message)
        elif isinstance(message, pb.TaskDone):
            await run.finished(session, message)
        elif isinstance(message, pb.TaskFailed):
            run.failed(session.client, message)
        elif isinstance(message, pb.EvaluationDone):
            run.evaluated(message)

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.CreateRunResponse:
        code = grpc.StatusCode
        try:
            spec = spec_from_pb(request.spec)
            run = await self._coordinator.create(request.run, request.config_json, spec)
            return pb.CreateRunResponse(status=_status(run))
        except NameTaken as error:
            await refuse(context, code.ALREADY_EXISTS, str(error), "exists")
        except ModelMissing as error:
            await refuse(context, code.FAILED_PRECONDITION, str(error), "no_model")
        except aio.AioRpcError as error:
            text = f"an aggregator does not answer ({error.details()}): start it, then create the run again"
            await refuse(context, code.UNAVAILABLE, text, "aggregator")
        except ServiceError as error:
            await refuse(context, code.UNAVAILABLE, str(error))
        except FedelError as error:
            await refuse(context, code.INVALID_ARGUMENT, str(error), "config")

    async def ControlRun(self, request: pb.ControlRunRequest, context: Any) -> pb.ControlRunResponse:
        known = await self._find(request.run, context)
        try:
            if request.action == pb.RUN_ACTION_UNSPECIFIED:
                raise ConfigError("no action: say pause, resume or stop")
            if isinstance(known, Run):
                await known.control(request.action)
            elif request.action != pb.RUN_ACTION_STOP:
                raise ServiceError(f"run '{known.name}' is {known.phase}: create a new run to train on")
        except ConfigError as error:
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error), "action")
        except StoreUnavailable as error:
            await refuse(context, grpc.StatusCode.UNAVAILABLE, str(error), "store")
        except ServiceError as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error), "ended")
        return pb.ControlRunResponse(status=_status(known))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:  # noqa: ARG002
        rows = await asyncio.to_thread(self._coordinator.store.runs)
        return pb.ListRunsResponse(runs=[_status(self._coordinator.runs.get(row.name, row)) for row in rows])

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        known, sent = await self._find(request.run, context), 0
        while True:
            change = known.news.next() if isinstance(known, Run) else asyncio.Event()
            over = known.phase in ENDED
            records = await self._records(known.name, sent)
            sent += len(records)
            now = _status(known)
            now.rounds_json.extend(records)
            yield pb.WatchRunResponse(status=now)
            if self._coordinator.stopping and not over:
                text = "the coordinator stops; the run goes on when it is back"
                await refuse(context, grpc.StatusCode.UNAVAILABLE, text, "stopping")
            if over and not records:
                return
            if not records:
                await self._rest(change)

    async def _rest(self, change: asyncio.Event) -> None:
        """Until something changed; without any change a follower still hears now and then who is silent."""
        try:
            await asyncio.wait_for(change.wait(), self._coordinator.config.heartbeat_seconds)
        except asyncio.TimeoutError:
            return
        if not self._coordinator.stopping:
            await asyncio.sleep(REST_SECONDS)

    async def _records(self, run: str, start: int) -> list[str]:
        """The next closed rounds, as many as go into a message."""
        texts = await asyncio.to_thread(self._coordinator.store.records, run, start, BATCH_ROUNDS)
        taken: list[str] = []
        size = 0
        for text in texts:
            size += len(text)
            if taken and size > BATCH_BYTES:
                break
            taken.append(text)
        return taken

    async def ListAggregators(
        self,
        request: pb.ListAggregatorsRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.ListAggregatorsResponse:
        return pb.ListAggregatorsResponse(addresses=self._coordinator.config.reachable)

    async def _find(self, name: str, context: Any) -> Run | RunRow:
        """The run, live or stored; without a name the newest."""
        if name in self._coordinator.runs:
            return self._coordinator.runs[name]
        rows = await asyncio.to_thread(self._coordinator.store.runs)
        row = next((row for row in rows if name in ("", row.name)), None)
        if row is None:
            text = f"no run '{name}' here; ListRuns tells which there are" if name else "there is no run yet"
            await refuse(context, grpc.StatusCode.NOT_FOUND, text, "unknown_run")
        return self._coordinator.runs.get(row.name, row)


def _status(run: Run | RunRow) -> pb.RunStatus:
    return status.live(run) if isinstance(run, Run) else status.stored(run)


async def _hello(requests: Any, context: Any) -> pb.Hello:  # noqa: RET503  # refuse never returns
    async for request in requests:
        hello: pb.Hello = request.hello
        named = 0 < len(hello.client) <= MAX_CLIENT_NAME and hello.client.isprintable()
        if request.WhichOneof("kind") == "hello" and named:
            return hello
        break
    text = f"a session begins with Hello and a client's name of at most {MAX_CLIENT_NAME} printable letters"
    await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, text, "hello")
