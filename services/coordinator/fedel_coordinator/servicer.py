"""The coordinator's gRPC service: agents' sessions, and the calls that create, control and watch runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from fedel_services.guard import require_client
from grpc import aio

from fedel.errors import ConfigError
from fedel.roles import events as ev
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from fedel.wire.codec import spec_from_pb
from fedel_coordinator import messages
from fedel_coordinator.change_signal import wait_for_event
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.errors import AggregatorAway, NoSuchRun, SessionReplaced, Stopping
from fedel_coordinator.run_view import ShownRun
from fedel_coordinator.sessions import Device
from fedel_coordinator.sessions import Session as AgentSession
from fedel_coordinator.status import run_status

log = logging.getLogger(__name__)

REST_SECONDS = 0.1
"""A follower receives changes at most this often."""
BATCH_BYTES = 1024 * 1024
BATCH_ROUNDS = 200
MAX_CLIENT_NAME = 200


class CoordinatorServicer(CoordinatorServiceServicer):
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Receives and sends at the same time; sending ends when receiving does."""
        hello = await _hello(request_iterator)
        await require_client(context, hello.client)
        device = Device(hello.device.device_type, hello.device.memory_bytes, hello.device.agent_version)
        session = self._coordinator.sessions.open(hello.client, device)
        receiving = asyncio.create_task(self._receive(session, request_iterator))
        try:
            welcome = pb.Welcome(heartbeat_seconds=self._coordinator.config.heartbeat_seconds)
            await context.write(pb.SessionResponse(welcome=welcome))
            for offer in self._coordinator.offers():
                session.push(offer)
            async for message in session.messages():
                await context.write(message)
            await self._end(session, receiving, context)
        finally:
            receiving.cancel()
            self._close(session)

    async def _receive(self, session: AgentSession, requests: Any) -> None:
        try:
            async for request in requests:
                if not session.superseded:
                    self._heard(session)
                    await self._take(session, request)
        finally:
            session.end()

    def _heard(self, session: AgentSession) -> None:
        was_present = self._coordinator.sessions.present(session.client)
        self._coordinator.sessions.heard(session.client)
        if not was_present:
            for name in session.joined:
                self._coordinator.runs[name].wake()

    async def _take(self, session: AgentSession, request: pb.SessionRequest) -> None:
        kind = request.WhichOneof("kind")
        if kind is None or kind in ("hello", "heartbeat"):
            self._coordinator.metrics.heartbeats.inc(kind == "heartbeat")
            return
        message: messages.Message = getattr(request, kind)
        run = self._coordinator.runs.get(message.run)
        if run is not None:
            await run.receive(session, message)
        else:
            self._coordinator.metrics.refused.labels("unknown_run").inc()
            reason = f"this coordinator has no live run '{message.run}': wait for an offer"
            session.push(messages.refusal_message(message.run, reason))

    async def _end(self, session: AgentSession, receiving: asyncio.Task[None], context: Any) -> None:
        """Say why the stream ends; where the agent closed it, it left its runs."""
        client = session.client
        if session.superseded:
            self._coordinator.metrics.refused.labels("superseded").inc()
            raise SessionReplaced(
                f"another agent opened a session as client '{client}': give every agent a name of its own"
            )
        if not receiving.done():
            return
        if (error := receiving.exception()) is not None:
            raise error
        # A stream that broke looks like one that was closed, until something is written to it.
        await context.write(pb.SessionResponse())
        for name in session.joined:
            # Checked for every run: the client may come back while it leaves the run before.
            if self._coordinator.sessions.is_current(session):
                await self._coordinator.runs[name].left(client)

    def _close(self, session: AgentSession) -> None:
        """A newer session of the client may have joined already: then the client is not disconnected."""
        if self._coordinator.sessions.is_current(session):
            self._coordinator.sessions.close(session)
            for name in session.joined:
                self._coordinator.runs[name].post(ev.Disconnected(session.client))

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.CreateRunResponse:  # noqa: ARG002
        try:
            run = await self._coordinator.create(request.run, request.config_json, spec_from_pb(request.spec))
        except aio.AioRpcError as error:
            raise AggregatorAway(
                f"an aggregator does not answer ({error.details()}): start it, then create the run again"
            ) from None
        return pb.CreateRunResponse(status=await self._status(run))

    async def ControlRun(self, request: pb.ControlRunRequest, context: Any) -> pb.ControlRunResponse:  # noqa: ARG002
        run = await self._find(request.run)
        action = messages.ACTIONS.get(request.action)
        if action is None:
            raise ConfigError("no action: choose pause, resume or stop")
        await run.control(action)
        return pb.ControlRunResponse(status=await self._status(run))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:  # noqa: ARG002
        runs = await self._coordinator.shown_runs()
        return pb.ListRunsResponse(runs=[await self._status(run) for run in runs])

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:  # noqa: ARG002
        run, sent = await self._find(request.run), 0
        while True:
            change = run.change.next()
            ended = run.ended
            records = await self._records(run.name, sent)
            sent += len(records)
            status = await self._status(run)
            status.rounds_json.extend(records)
            yield pb.WatchRunResponse(status=status)
            if self._coordinator.stopping and not ended:
                raise Stopping("the coordinator is stopping; the run goes on after its next start")
            if ended and not records:
                return
            if not records:
                await self._rest(change)

    async def _rest(self, change: asyncio.Event) -> None:
        """Until something changed; from time to time anyway, because silence grows without any change."""
        changed = await wait_for_event(change, self._coordinator.config.heartbeat_seconds)
        if changed and not self._coordinator.stopping:
            await asyncio.sleep(REST_SECONDS)

    async def _records(self, run: str, start: int) -> list[str]:
        """The next closed rounds, as many as go into one message."""
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

    async def _find(self, name: str) -> ShownRun:
        """The run; without a name the newest."""
        run = await self._coordinator.find(name)
        if run is None:
            raise NoSuchRun(f"no run '{name}' here; `fedel runs` lists them" if name else "there is no run yet")
        return run

    async def _status(self, run: ShownRun) -> pb.RunStatus:
        """With the clients of a live run; those of an ended run are in its records."""
        clients = [] if run.name not in self._coordinator.runs else (await run.clients()).values()
        return run_status(run.view(), clients, self._coordinator.clock())


async def _hello(requests: Any) -> pb.Hello:
    async for request in requests:
        hello: pb.Hello = request.hello
        named = 0 < len(hello.client) <= MAX_CLIENT_NAME and hello.client.isprintable()
        if request.WhichOneof("kind") == "hello" and named:
            return hello
        break
    raise ConfigError(
        f"a session begins with Hello and a client's name of at most {MAX_CLIENT_NAME} printable letters"
    )
