"""Every call is worked on under the id that its caller sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from fedel import request_id


class RequestIds(aio.ServerInterceptor):
    """The first of all: what the others log has the id too. gRPC runs them and the servicer in one task."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        request_id.begin(dict(details.invocation_metadata or ()).get(request_id.HEADER, ""))
        return await continuation(details)
