"""The sessions of agents: who is connected, who has fallen silent, and sending messages to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fedel.v1 import coordinator_pb2 as pb


@dataclass(frozen=True)
class Device:
    """What an agent says about its hardware."""

    device_type: str = ""
    memory_bytes: int = 0
    agent_version: str = ""


class Session:
    """One agent's stream. Messages wait here and leave in order."""

    def __init__(self, client: str, device: Device) -> None:
        self.client = client
        self.device = device
        self.joined: set[str] = set()
        """Runs for which the agent is ready."""
        self.superseded = False
        self._outbox: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()

    def push(self, message: pb.SessionResponse) -> None:
        self._outbox.put_nowait(message)

    def end(self) -> None:
        """End the stream after what is waiting has left."""
        self._outbox.put_nowait(None)

    async def messages(self) -> AsyncIterator[pb.SessionResponse]:
        while (message := await self._outbox.get()) is not None:
            yield message


class Sessions:
    """Every open session, and when each client was last heard.

    A client is present until it has been silent for ``silent_seconds``, whether or not its stream broke. For a
    client that was never heard, silence begins with the process, so that a restart drops nobody.
    """

    def __init__(self, silent_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silent_seconds = silent_seconds
        self._clock = clock
        self._started = clock()
        self._heard: dict[str, float] = {}
        self._sessions: dict[str, Session] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def open(self, client: str, device: Device) -> Session:
        """A new session. An older one of the same client is ended, because its agent is most likely gone."""
        older = self._sessions.get(client)
        if older is not None:
            older.superseded = True
            older.end()
        session = Session(client, device)
        self._sessions[client] = session
        self.heard(client)
        return session

    def is_current(self, session: Session) -> bool:
        """Whether no newer session of the same client took its place."""
        return self._sessions.get(session.client) is session

    def close(self, session: Session) -> None:
        if self.is_current(session):
            del self._sessions[session.client]

    def end_all(self) -> None:
        for session in self._sessions.values():
            session.end()

    def heard(self, client: str) -> None:
        self._heard[client] = self._clock()

    def silent_for(self, client: str) -> float:
        return self._clock() - self._heard.get(client, self._started)

    def present(self, client: str) -> bool:
        return self.silent_for(client) < self._silent_seconds

    def ready(self, client: str, run: str) -> bool:
        """Whether a message of the run would reach the client now."""
        session = self._sessions.get(client)
        return session is not None and run in session.joined

    def push(self, client: str, run: str, message: pb.SessionResponse) -> None:
        """Send to a client that is ready for the run; another gets what it missed when it joins again."""
        if self.ready(client, run):
            self._sessions[client].push(message)

    def push_all(self, message: pb.SessionResponse) -> None:
        for session in self._sessions.values():
            session.push(message)
