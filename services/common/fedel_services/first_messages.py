"""Requests that do not come: the call ends with a status that says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from fedel.errors import UpdateRefused
from fedel_services.handlers import behaviour_of, with_behaviour
from fedel_services.tasks import drop

FIRST_SECONDS = 20.0
"""A caller that opens a stream sends its first message within this time."""


class Timed:
    """A stream of requests whose first message, or each, must come in time; else DEADLINE_EXCEEDED."""

    def __init__(self, requests: Any, first_seconds: float, next_seconds: float | None = None) -> None:
        """Without ``next_seconds`` the caller may be silent after its first message."""
        self._requests = requests
        self._messages: AsyncIterator[Any] | None = None
        self._seconds: float | None = first_seconds
        self._next_seconds = next_seconds

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._messages is None:
            # Not before: a servicer may read from the context instead, and gRPC's iterator wants to be used.
            self._messages = aiter(self._requests)
        if self._seconds is None:
            return await anext(self._messages)
        # Not wait_for: if a message comes in the moment in which the caller is cancelled, that goes on (3.11).
        reading = asyncio.ensure_future(_next(self._messages))
        try:
            await asyncio.wait({reading}, timeout=self._seconds)
            if not reading.done():
                raise UpdateRefused("idle", f"nothing came for {self._seconds:g} s: open it again")
            message = reading.result()
        finally:
            drop(reading)
        self._seconds = self._next_seconds
        return message


async def _next(messages: AsyncIterator[Any]) -> Any:
    return await anext(messages)


class FirstMessages(aio.ServerInterceptor):
    """Ends streams whose first message does not come. Stands behind ``ErrorStatuses``, which answers."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not handler.request_streaming:
            return handler
        behaviour = behaviour_of(handler)

        async def answer(requests: Any, context: Any) -> Any:
            return await behaviour(Timed(requests, FIRST_SECONDS), context)

        return with_behaviour(handler, answer)
