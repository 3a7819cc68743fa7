"""The session of an agent on the wire: Hello within a time, then messages both ways, within limits."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fedel_services.guard import caller, require_client
from fedel_services.tasks import drop

import fedel
from fedel.errors import ConfigError
from fedel.roles import events as ev
from fedel.roles.gate import MAX_NAME, clean
from fedel.roles.gate_session import objection_to_hello
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.protocol import PROTOCOL, objection
from fedel_coordinator import messages
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.errors import SessionReplaced, SessionSilent, WrongProtocol
from fedel_coordinator.sessions import Device, Session

log = logging.getLogger(__name__)


class AgentSessions:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def serve(self, requests: Any, context: Any) -> None:
        """Receives and sends at the same time; sending ends when receiving does."""
        hello = await self._hello(requests)
        await require_client(context, hello.client)
        device = Device(hello.device.device_type, hello.device.memory_bytes, hello.device.agent_version)
        self._register(hello, device)
        await self._coordinator.settle_agent(hello.client)  # its labels may have changed
        session = self._coordinator.sessions.open(hello.client, device)
        receiving = asyncio.create_task(self._receive(session, requests))
        sending = asyncio.create_task(self._send(session, context))
        broken = asyncio.create_task(session.broken.wait())
        try:
            await asyncio.wait({sending, broken}, return_when=asyncio.FIRST_COMPLETED)
            if session.error is not None:
                self._coordinator.metrics.refused.labels("session").inc()
                raise session.error
            await sending
            await self._end(session, receiving, context)
        finally:
            drop(receiving, sending, broken)
            self._close(session)

    async def _hello(self, requests: Any) -> pb.Hello:
        seconds = self._coordinator.config.hello_seconds
        try:
            request = await asyncio.wait_for(anext(aiter(requests), None), seconds)
        except asyncio.TimeoutError:
            raise SessionSilent(f"no Hello within {seconds:g} s: a session begins with it") from None
        if request is None or request.WhichOneof("kind") != "hello":
            raise ConfigError("a session begins with Hello and the client's name")
        hello: pb.Hello = request.hello
        device = hello.device
        facts = (device.device_type, device.agent_version, device.memory_bytes)
        if wrong := objection_to_hello(hello.client, *facts, hello.labels, hello.protocol):
            raise ConfigError(f"Hello: {wrong}")
        return hello

    def _register(self, hello: pb.Hello, device: Device) -> None:
        """In the list of agents; refused if its version and this one do not work together."""
        fleet, client, known = self._coordinator.fleet, hello.client, caller()
        certificate_end = known.facts.not_after.timestamp() if known else 0.0
        fleet.opened(client, device, dict(hello.labels), hello.protocol, certificate_end)
        version = device.agent_version
        wrong = objection("agent", hello.protocol, version, "coordinator", fedel.__version__)
        if wrong:
            if fleet.failed(client, "", -1, wrong):
                log.warning("agent '%s' is refused: %s", client, wrong, extra={"client": client})
            fleet.closed(client, said_goodbye=True)
            raise WrongProtocol(wrong)

    async def _send(self, session: Session, context: Any) -> None:
        seconds = self._coordinator.config.heartbeat_seconds
        welcome = pb.Welcome(heartbeat_seconds=seconds, protocol=PROTOCOL, version=fedel.__version__)
        await context.write(pb.SessionResponse(welcome=welcome))
        for offer in self._coordinator.offers(session.client):
            session.push(offer)
        async for message in session.messages():
            await context.write(message)

    async def _receive(self, session: Session, requests: Any) -> None:
        try:
            async for request in requests:
                session.count_message()
                if session.error is not None:
                    return
                if not session.superseded:
                    self._heard(session)
                    await self._take(session, request)
        finally:
            session.end()

    def _heard(self, session: Session) -> None:
        was_present = self._coordinator.sessions.present(session.client)
        self._coordinator.sessions.heard(session.client)
        if not was_present:
            for name in session.joined:
                self._coordinator.runs[name].wake(heard_again=True)

    async def _take(self, session: Session, request: pb.SessionRequest) -> None:
        kind = request.WhichOneof("kind")
        if kind is None or kind in ("hello", "heartbeat"):
            self._coordinator.metrics.heartbeats.inc(kind == "heartbeat")
            return
        message: messages.Message = getattr(request, kind)
        run = self._coordinator.runs.get(message.run)
        dry_run = self._coordinator.dry_runs.get(message.run)
        if run is not None:
            await run.receive(session, message)
        elif dry_run is not None:
            dry_run.receive(session, message)
        else:
            self._coordinator.metrics.refused.labels("unknown_run").inc()
            session.count_refusal()
            name = clean(message.run, MAX_NAME)
            reason = f"this coordinator has no live run '{name}': wait for an offer"
            session.push(messages.refusal_message(name, reason))

    async def _end(self, session: Session, receiving: asyncio.Task[None], context: Any) -> None:
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
        session.said_goodbye = True
        for name in session.joined:
            # Checked for every run: the client may come back while it leaves the run before.
            if self._coordinator.sessions.is_current(session):
                await self._coordinator.runs[name].left(client)

    def _close(self, session: Session) -> None:
        """A newer session of the client may have joined already: then the client is not disconnected."""
        if self._coordinator.sessions.is_current(session):
            self._coordinator.fleet.closed(session.client, session.said_goodbye)
            self._coordinator.sessions.close(session)
            for name in session.joined:
                self._coordinator.runs[name].post(ev.Disconnected(session.client))
