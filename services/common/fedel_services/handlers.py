"""What an interceptor needs: the function behind an RPC, and a handler like it with another function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

Behaviour = Callable[[Any, Any], Awaitable[Any]]
"""Takes the request (or its stream) and the context; returns the answer; ``None`` after writing a stream."""
_MAKE: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def behaviour_of(handler: Any) -> Behaviour:
    """The function behind an RPC of any kind, always as a coroutine: a generator's messages are written."""
    function = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    if not inspect.isasyncgenfunction(function):
        return function  # type: ignore[no-any-return]

    async def write_all(request: Any, context: Any) -> None:
        async with aclosing(function(request, context)) as messages:
            async for message in messages:
                await context.write(message)

    return write_all


def with_behaviour(handler: Any, behaviour: Behaviour, parse: Callable[[bytes], Any] | None = None) -> Any:
    """The same RPC with another function, and with another parser of its requests if one is given."""
    make = _MAKE[handler.request_streaming, handler.response_streaming]
    return make(behaviour, parse or handler.request_deserializer, handler.response_serializer)
