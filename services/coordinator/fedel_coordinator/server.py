"""A coordinator that listens: its runs taken up, its health told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fedel_services.errors import Status, Statuses
from fedel_services.http import new_registry
from fedel_services.runtime import Server
from grpc import StatusCode

from fedel.files import write_atomic
from fedel.telemetry import CoordinatorMetrics
from fedel.v1 import coordinator_pb2
from fedel.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.coordinator import Coordinator, ModelMissing, NameTaken
from fedel_coordinator.enrolment import enrolling
from fedel_coordinator.servicer import CoordinatorServicer
from fedel_coordinator.shards import Shards
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import Store, StoreUnavailable
from fedel_coordinator.web.page import showing

log = logging.getLogger(__name__)
SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
STATUSES: Statuses = {
    StoreUnavailable: Status(StatusCode.UNAVAILABLE, "store"),
    NameTaken: Status(StatusCode.ALREADY_EXISTS, "exists"),
    ModelMissing: Status(StatusCode.FAILED_PRECONDITION, "no_model"),
}
"""How calls end with errors of the coordinator's own."""


@asynccontextmanager
async def serving(
    config: CoordinatorConfig,
    store: Store | None = None,
    shards: Shards | None = None,
    now: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[str, Coordinator]]:
    """A server that is ready, with its address; on leaving it stops, and its runs go on at the next start."""
    kept: Store = await asyncio.to_thread(SqlStore, config.database_url) if store is None else store
    shards = shards or Shards(config.aggregators, config.tls)
    registry = new_registry("coordinator")
    coordinator = Coordinator(config, kept, shards, now=now, metrics=CoordinatorMetrics(registry))
    server = Server([SERVICE], config.tls, registry, STATUSES)
    add_CoordinatorServiceServicer_to_server(CoordinatorServicer(coordinator), server.grpc)
    try:
        await coordinator.start()
        async with enrolling(config.enrolment, config.tls, server):
            port = await server.start(config.listen, config.health)
            await server.set_ready(True)
            address = f"{config.listen.rpartition(':')[0]}:{port}"
            if config.port_file is not None:
                await asyncio.to_thread(write_atomic, config.port_file, address)
            log.info("coordinator listens on %s", address)
            async with showing(coordinator, registry):
                yield address, coordinator
    finally:
        await coordinator.stop()
        await server.stop()
        await shards.close()
        await asyncio.to_thread(kept.close)
