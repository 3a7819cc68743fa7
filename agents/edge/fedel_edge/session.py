"""The one long-lived stream to the coordinator: opened again after every break, kept alive by heartbeats."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

import fedel
from fedel import request_id
from fedel.roles.gate import MAX_NAME, clean
from fedel.v1 import coordinator_pb2
from fedel.v1.coordinator_pb2 import SessionRequest, SessionResponse
from fedel.wire.protocol import objection
from fedel.wire.retry import Backoff, describe, is_transient, retrying
from fedel_edge.gate import heartbeat_seconds

if TYPE_CHECKING:
    from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

_log = logging.getLogger(__name__)
_GOODBYE_SECONDS = 2.0
"""How long the coordinator may take to end a session that we closed."""
_REFUSED_FAILURES = 7
"""A coordinator that refuses us is tried as rarely as one that has failed this often."""
_WRITE_FAILED = "Internal error from Core"

Outgoing = asyncio.Queue[SessionRequest | None]


class StreamEnded(Exception):
    """A stream ended without an error, although we did not close it."""


class WrongProtocol(StreamEnded):
    """The coordinator's version and this one do not work together."""


class Session:
    """Sends hello, hands every message to ``on_message``, and connects again when the stream breaks."""

    def __init__(
        self,
        dial: Callable[[], CoordinatorServiceAsyncStub],
        hello: coordinator_pb2.Hello,
        on_message: Callable[[SessionResponse], None],
        on_break: Callable[[], None] = lambda: None,
    ) -> None:
        """``dial`` is called for every stream, ``on_break`` whenever one ends that we did not close."""
        self._dial, self._hello, self._on_message, self._on_break = dial, hello, on_message, on_break
        self._outgoing: Outgoing | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._call: Any = None
        self._redialled = self._closing = False
        self._task = asyncio.ensure_future(
            retrying(
                self._one_stream,
                retried=lambda error: isinstance(error, aio.AioRpcError | StreamEnded),
                on_failure=self._on_failure,
                backoff=self._backoff,
            )
        )

    def send(self, message: SessionRequest) -> None:
        """A message sent while there is no stream is lost; what matters is sent again on the next one."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    def redial(self) -> None:
        """End the stream and open another at once, to present a new certificate."""
        if self._call is not None:
            self._redialled = True
            self._call.cancel()

    async def wait(self) -> None:
        """Until the session ends, which it does only when it is closed or something here is broken."""
        await asyncio.shield(self._task)

    async def close(self) -> None:
        """Send what is still to be sent, then say goodbye."""
        self._closing = True
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)
            await asyncio.wait({self._task}, timeout=_GOODBYE_SECONDS)
        # Without a stream it is waiting for the next attempt, which cancelling ends.
        self._task.cancel()
        await asyncio.wait({self._task})

    def _on_failure(self, error: Exception, failures: int) -> None:
        refused = isinstance(error, aio.AioRpcError) and not worth_retrying(error)
        if refused or isinstance(error, WrongProtocol):
            self._backoff.failures = max(failures, _REFUSED_FAILURES)
        self._on_break()
        level = logging.WARNING if self._backoff.failures in (1, _REFUSED_FAILURES) else logging.DEBUG
        _log.log(level, "no session with the coordinator (%s): trying again", clean(describe(error)))

    async def _one_stream(self) -> None:
        """Returns only once we closed it; every other end is an exception."""
        request_id.begin()  # what comes of this stream has its id, at all servers
        outgoing: Outgoing = asyncio.Queue()
        self._outgoing = outgoing
        self.send(SessionRequest(hello=self._hello))
        self._call = call = self._dial().Session(_until_none(outgoing))
        try:
            async for message in call:
                if message.WhichOneof("kind") == "welcome":
                    self._on_welcome(message.welcome)
                self._on_message(message)
        except aio.AioRpcError:
            if not self._closing:
                raise
        except asyncio.CancelledError:
            if self._closing or not self._redialled:
                raise
            raise StreamEnded("there is a new certificate to present") from None
        finally:
            self._redialled, self._call, self._outgoing = False, None, None
            self._end_heartbeat()
            outgoing.put_nowait(None)  # or what reads it waits for ever, and is in the log when it is collected
            call.cancel()
        if not self._closing:
            raise StreamEnded("the coordinator ended it")

    def _on_welcome(self, welcome: coordinator_pb2.Welcome) -> None:
        version = clean(welcome.version, MAX_NAME)
        wrong = objection("coordinator", welcome.protocol, version, "agent", fedel.__version__)
        if wrong:
            raise WrongProtocol(wrong)
        self._backoff.reset()
        self._end_heartbeat()
        self._heartbeat = asyncio.ensure_future(self._beat(heartbeat_seconds(welcome)))
        _log.info("in session with the coordinator", extra={"client": self._hello.client})

    def _end_heartbeat(self) -> None:
        if self._heartbeat:
            self._heartbeat.cancel()

    async def _beat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self.send(SessionRequest(heartbeat=coordinator_pb2.Heartbeat()))


def worth_retrying(error: aio.AioRpcError) -> bool:
    """Whether the link broke. A write on a stream that had ended counts too: grpc.aio then replaces the status
    that the coordinator gave by an error of its own (grpc issue 36066), and only the next attempt shows it."""
    hidden = error.code() is grpc.StatusCode.INTERNAL and _WRITE_FAILED in (error.details() or "")
    return hidden or is_transient(error)


async def _until_none(outgoing: Outgoing) -> AsyncIterator[SessionRequest]:
    while (message := await outgoing.get()) is not None:
        yield message
