"""The sessions of agents: who is connected, who has fallen silent, and sending messages to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fedel.v1 import coordinator_pb2 as pb
from fedel_coordinator.errors import SessionAbused, SessionSilent

MAX_OUTBOX = 1000
"""Messages that may wait for an agent that does not read; each of them is small."""
SILENT_TIMES = 20
"""A session is ended when its client has been silent for this many times what makes it lose its tasks."""
BURST_SECONDS = 30.0
"""A session may be over its rate for so long before it is ended."""


@dataclass(frozen=True)
class Device:
    """What an agent says about its hardware."""

    device_type: str = ""
    memory_bytes: int = 0
    agent_version: str = ""


@dataclass(frozen=True)
class SessionLimits:
    """What a session may do before it is ended."""

    messages_per_second: float = 20.0
    refused_messages: int = 100


class Session:
    """One agent's stream. Messages wait here and leave in order."""

    def __init__(self, client: str, device: Device, limits: SessionLimits | None = None) -> None:
        self.client = client
        self.device = device
        self.joined: set[str] = set()
        """Runs for which the agent is ready."""
        self.superseded = False
        self.said_goodbye = False
        self.error: SessionAbused | SessionSilent | None = None
        """Why the session is ended at once, whatever still waits."""
        self.broken = asyncio.Event()
        """Set together with ``error``."""
        self._outbox: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self._limits = limits or SessionLimits()
        self._num_refused = 0
        self._tokens, self._filled_at = self._most_tokens, time.monotonic()

    @property
    def _most_tokens(self) -> float:
        return self._limits.messages_per_second * BURST_SECONDS

    def push(self, message: pb.SessionResponse) -> None:
        if self._outbox.qsize() < MAX_OUTBOX:
            self._outbox.put_nowait(message)
        else:
            self.fail(f"the agent does not read: {MAX_OUTBOX} messages wait for it; let it connect again")

    def end(self) -> None:
        """End the stream after what is waiting has left."""
        self._outbox.put_nowait(None)

    def fail(self, reason: str, kind: type[SessionAbused | SessionSilent] = SessionAbused) -> None:
        """End the stream at once."""
        self.error = self.error or kind(f"session of client '{self.client}': {reason}")
        self.broken.set()

    def count_message(self) -> None:
        """Each message takes a token; tokens come back at the allowed rate."""
        now = time.monotonic()
        rate = self._limits.messages_per_second
        self._tokens = min(self._most_tokens, self._tokens + (now - self._filled_at) * rate) - 1
        self._filled_at = now
        if self._tokens < 0:
            self.fail(f"it sends more than {rate:g} messages a second (max_messages_per_second)")

    def count_refusal(self) -> None:
        self._num_refused += 1
        if self._num_refused >= self._limits.refused_messages:
            self.fail(
                f"{self._num_refused} of its messages were refused (max_refused_messages): update the agent,"
                " and look into the coordinator's log"
            )

    async def messages(self) -> AsyncIterator[pb.SessionResponse]:
        while (message := await self._outbox.get()) is not None:
            yield message


class Sessions:
    """Every open session, and when each client was last heard.

    A client is present until it has been silent for ``silent_seconds``, whether or not its stream broke. For a
    client that was never heard, silence begins with the process, so that a restart drops nobody; nor does time
    count in which this process itself did not run.
    """

    def __init__(
        self,
        silent_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        limits: SessionLimits | None = None,
    ) -> None:
        self.silent_seconds = silent_seconds
        self._clock = clock
        self._limits = limits
        self._awake_since = clock()
        self._pulse_at = time.monotonic()
        self._heard: dict[str, float] = {}
        self._sessions: dict[str, Session] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def clients(self) -> list[str]:
        """Those with an open session."""
        return list(self._sessions)

    def is_open(self, client: str) -> bool:
        """Whether the client has a session."""
        return client in self._sessions

    def joined(self, client: str) -> frozenset[str]:
        """The runs for which the client is ready."""
        session = self._sessions.get(client)
        return frozenset(session.joined) if session else frozenset()

    def open(self, client: str, device: Device) -> Session:
        """A new session. An older one of the same client is ended, because its agent is most likely gone."""
        older = self._sessions.get(client)
        if older is not None:
            older.superseded = True
            older.end()
        session = Session(client, device, self._limits)
        self._sessions[client] = session
        self.heard(client)
        return session

    def is_current(self, session: Session) -> bool:
        """Whether no newer session of the same client took its place."""
        return self._sessions.get(session.client) is session

    def close(self, session: Session) -> None:
        if self.is_current(session):
            del self._sessions[session.client]
            if not session.joined:
                self.forget(session.client)

    def forget(self, client: str) -> None:
        """Nobody asks when the client was last heard."""
        self._heard.pop(client, None)

    def end_silent(self) -> None:
        """End the sessions that have said nothing for too long. One look at all of them now and then costs less
        than a timer for every message of each."""
        seconds = SILENT_TIMES * self.silent_seconds
        for client, session in self._sessions.items():
            if self._clock() - self._last_sign(client) > seconds:
                session.fail(f"nothing came for {seconds:g} s: open it again", SessionSilent)

    def end_all(self) -> None:
        for session in self._sessions.values():
            session.end()

    def now(self) -> float:
        """On the clock that silence is measured with."""
        return self._clock()

    def heard(self, client: str) -> None:
        self._heard[client] = self._clock()

    def pulse(self) -> None:
        """Called all the time. After a gap, this process did not run and could hear nobody."""
        now = time.monotonic()
        if now - self._pulse_at > self.silent_seconds / 2:
            self._awake_since = self._clock()
        self._pulse_at = now

    def silent_for(self, client: str) -> float:
        return max(0.0, self._clock() - self._heard.get(client, self._awake_since))

    def present(self, client: str) -> bool:
        return self._clock() - self._last_sign(client) < self.silent_seconds

    def _last_sign(self, client: str) -> float:
        """When the client was last heard, or this process began to listen."""
        return max(self._heard.get(client, self._awake_since), self._awake_since)

    def ready(self, client: str, run: str) -> bool:
        """Whether a message of the run would reach the client now."""
        session = self._sessions.get(client)
        return session is not None and run in session.joined

    def push(self, client: str, run: str, message: pb.SessionResponse) -> None:
        """Send to a client that is ready for the run; another gets what it missed when it joins again."""
        if self.ready(client, run):
            self._sessions[client].push(message)

    def push_to(self, client: str, message: pb.SessionResponse) -> None:
        """Send to a client, ready for a run or not."""
        if self.is_open(client):
            self._sessions[client].push(message)

    def count_refusal(self, client: str) -> None:
        """A message of the client did not pass the gate."""
        session = self._sessions.get(client)
        if session is not None:
            session.count_refusal()
