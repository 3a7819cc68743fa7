"""The one long-lived stream to the coordinator: kept up for ever, with heartbeats, and closed politely."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from fedel.v1 import coordinator_pb2
from fedel.v1.coordinator_pb2 import SessionRequest, SessionResponse
from fedel.wire.channel import RETRIED, backoff_seconds

if TYPE_CHECKING:
    from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

_log = logging.getLogger(__name__)
_GOODBYE_SECONDS = 2.0
"""How long the coordinator may take to end a session that we closed."""
_REFUSED_TRIES = 6
"""A coordinator that refuses us is asked again as rarely as one that has long been away."""
_WRITE_FAILED = "Internal error from Core"

Outgoing = asyncio.Queue[SessionRequest | None]


class Session:
    """Says hello, hands what the coordinator says to ``hear``, and dials again when the stream breaks."""

    def __init__(
        self,
        dial: Callable[[], CoordinatorServiceAsyncStub],
        hello: coordinator_pb2.Hello,
        hear: Callable[[SessionResponse], None],
        broke: Callable[[], None] = lambda: None,
    ) -> None:
        """``dial`` is asked for every stream, ``broke`` called whenever one ends that we did not close."""
        self._dial, self._hello, self._hear, self._broke = dial, hello, hear, broke
        self._outgoing: Outgoing | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._tries = 0
        self._call: Any = None
        self._redialled = False
        self._closing = asyncio.Event()
        self._task = asyncio.ensure_future(self._keep_up())

    def send(self, message: SessionRequest) -> None:
        """What is said while there is no stream is lost; what matters is said again on the next one."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    def redial(self) -> None:
        """End the stream and open another at once: there is a new certificate to show."""
        if self._call is not None:
            self._redialled = True
            self._call.cancel()

    async def wait(self) -> None:
        """Until the session ends; it does not by itself, unless something here is broken."""
        await asyncio.shield(self._task)

    async def close(self) -> None:
        """Say all that was to be said, then goodbye."""
        self._closing.set()
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)
            await asyncio.wait({self._task}, timeout=_GOODBYE_SECONDS)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _keep_up(self) -> None:
        while not self._closing.is_set():
            why = "the coordinator ended the session"
            try:
                await self._one_stream()
            except asyncio.CancelledError:
                if not self._redialled:
                    raise
                self._redialled, why = False, "there is a new certificate to show"
            except aio.AioRpcError as error:
                why = error.details() or error.code().name
                if not worth_retrying(error):
                    self._tries = max(self._tries, _REFUSED_TRIES)
            if not self._closing.is_set():
                self._broke()
                level = logging.WARNING if self._tries in (0, _REFUSED_TRIES) else logging.DEBUG
                _log.log(level, "no session with the coordinator (%s): trying again", why)
                await self._pause(backoff_seconds(self._tries))
                self._tries += 1

    async def _pause(self, seconds: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _one_stream(self) -> None:
        outgoing: Outgoing = asyncio.Queue()
        self._outgoing = outgoing
        self.send(SessionRequest(hello=self._hello))
        self._call = call = self._dial().Session(_until_none(outgoing))
        try:
            async for message in call:
                if message.WhichOneof("kind") == "welcome":
                    self._welcomed(message.welcome)
                self._hear(message)
        finally:
            self._outgoing = None
            if self._heartbeat:
                self._heartbeat.cancel()
            call.cancel()

    def _welcomed(self, welcome: coordinator_pb2.Welcome) -> None:
        self._tries = 0
        self._heartbeat = asyncio.ensure_future(self._beat(welcome.heartbeat_seconds))
        _log.info("in session with the coordinator", extra={"client": self._hello.client})

    async def _beat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self.send(SessionRequest(heartbeat=coordinator_pb2.Heartbeat()))


def worth_retrying(error: aio.AioRpcError) -> bool:
    """A broken link is; so is a write on a stream that had ended, because grpc.aio puts an error of its own
    over the status that the coordinator gave (grpc issue 36066): the next try will tell."""
    hidden = error.code() is grpc.StatusCode.INTERNAL and _WRITE_FAILED in (error.details() or "")
    return hidden or error.code() in RETRIED


async def _until_none(outgoing: Outgoing) -> AsyncIterator[SessionRequest]:
    while (message := await outgoing.get()) is not None:
        yield message
