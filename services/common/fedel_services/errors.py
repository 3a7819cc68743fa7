"""How a call ends that is not answered: a gRPC status, a message that says what to do, a short reason."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from grpc import aio

from fedel.wire.streams import REASON


async def refuse(
    context: aio.ServicerContext[Any, Any], code: grpc.StatusCode, message: str, reason: str = ""
) -> NoReturn:
    """End a call with an error that says what to do; ``reason`` is one word, for scripts and metrics."""
    if reason:
        context.set_trailing_metadata(((REASON, reason),))
    await context.abort(code, message)
