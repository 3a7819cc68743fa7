"""Requests that cannot be read, or do not come: the call ends with a status that says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from fedel.errors import ConfigError, UpdateRefused
from fedel_services.handlers import behaviour_of, with_behaviour

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
        try:
            message = await asyncio.wait_for(anext(self._messages), self._seconds)
        except asyncio.TimeoutError:
            raise UpdateRefused("idle", f"nothing came for {self._seconds:g} s: open it again") from None
        self._seconds = self._next_seconds
        return message


@dataclass(frozen=True)
class _Unreadable:
    error: str


class Requests(aio.ServerInterceptor):
    """Stands between the servicers and ``ErrorStatuses``, which turns what is raised here into a status."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        behaviour, method = behaviour_of(handler), details.method.rpartition("/")[2]

        async def answer(request: Any, context: Any) -> Any:
            if isinstance(request, _Unreadable):
                raise _objection(method, request.error)
            stream = Timed(request, FIRST_SECONDS) if handler.request_streaming else request
            return await behaviour(stream, context)

        return with_behaviour(handler, answer, _read(handler, method))


def _read(handler: Any, method: str) -> Callable[[bytes], Any]:
    def read(message: bytes) -> Any:
        try:
            return handler.request_deserializer(message)
        except Exception as error:
            if handler.request_streaming:
                raise _objection(method, str(error)) from None
            # gRPC reads a single request before it calls anybody who could answer the error.
            return _Unreadable(str(error))

    return read


def _objection(method: str, error: str) -> ConfigError:
    return ConfigError(f"this is not a message of {method} ({error}): use the protos of this version of FedEL")
