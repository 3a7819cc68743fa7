"""gRPC health that also sends the server's time, so that a device can compare its clock."""

from __future__ import annotations

import time
from typing import Any

from grpc_health.v1 import health, health_pb2

from fedel.wire.clock import HEADER

now = time.time


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # the package has no types
    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        context.set_trailing_metadata(((HEADER, f"{now():.6f}"),))
        return await super().Check(request, context)
