"""What all attacks of the hostile agent share: who it is, where the servers are, what they answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from fedel.security.tls import Tls
from fedel.types import ModelSpec
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.streams import reason_of
from tests.security.support import Servers

NAME = "mallory"
OTHER = "client-0"
HOLD_SECONDS = 2.0
"""How long it sits on what it holds, before it takes the next."""
ANSWER_SECONDS = 60.0
"""How long a server may take to answer, on a busy machine."""
MANY = 20
LONG = "x" * 900_000
"""Just below the largest message of a session."""
ODD = "\x1b]0;mine\x07\x1b[2J[/red][link=http://evil]\n" + "y" * 5_000


class Attacker:
    """``joins``: it also joins the run, and so gets tasks; otherwise it only tries with what is refused."""

    def __init__(self, made: Servers, tls: Tls, run: str, ended_run: str, spec: ModelSpec, joins: bool) -> None:
        self._made, self._tls, self._run, self._ended_run = made, tls, run, ended_run
        self._spec, self._joins = spec, joins
        self.times: Counter[str] = Counter()
        """How often each attack was carried out."""
        self.answers: Counter[tuple[str, str]] = Counter()
        """What servers answered to each."""
        self.receipts: list[str] = []
        """Attacks after which an update of ours counted."""
        self._round = 0

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        async with (
            connect(self._made.coordinator_address, self._tls) as near,
            connect(self._made.aggregator_address, self._tls) as bulk,
        ):
            self._coordinator, self._aggregator = near, bulk
            self._sessions, self._bulk = CoordinatorServiceStub(near), AggregatorServiceStub(bulk)
            yield

    async def _answer(self, attack: str, call: Awaitable[Any]) -> None:
        """Carry it out, and count how it was answered."""
        try:
            await call
        except aio.AioRpcError as error:
            self.answers[attack, f"{error.code().name} {reason_of(error)}".strip()] += 1
        except asyncio.InvalidStateError:
            self.answers[attack, "ended while sending"] += 1
        else:
            self.answers[attack, "OK"] += 1
