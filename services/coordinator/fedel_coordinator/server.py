"""A coordinator that listens: loads its runs, serves gRPC and the page, says when it is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fedel_services.http import new_registry
from fedel_services.job_code import CodeServicer
from fedel_services.runtime import Server

from fedel.files import write_atomic
from fedel.telemetry import CoordinatorMetrics
from fedel.v1 import coordinator_pb2
from fedel.v1.code_pb2_grpc import add_CodeServiceServicer_to_server
from fedel.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.enrolment import serve_enrolment
from fedel_coordinator.errors import STATUSES
from fedel_coordinator.job_code import StoreShelf
from fedel_coordinator.servicer import CoordinatorServicer
from fedel_coordinator.shards import Shards
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import Store
from fedel_coordinator.web.page import serve_page

log = logging.getLogger(__name__)
MAX_MESSAGE = 1024 * 1024
"""Bytes of one message: a join with the profile of a large model, or a run's specification, needs a tenth."""
SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name


@asynccontextmanager
async def serve(
    config: CoordinatorConfig,
    store: Store | None = None,
    shards: Shards | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[str, Coordinator]]:
    """A server that is ready, with its address; on leaving it stops, and its runs go on at the next start."""
    kept: Store = await asyncio.to_thread(SqlStore, config.database_url) if store is None else store
    shards = shards or Shards(config.aggregators, config.tls)
    registry = new_registry("coordinator")
    coordinator = Coordinator(config, kept, shards, monotonic, CoordinatorMetrics(registry))
    options = [("grpc.max_receive_message_length", MAX_MESSAGE)]
    server = Server([SERVICE], config.tls, registry, STATUSES, options)
    add_CoordinatorServiceServicer_to_server(CoordinatorServicer(coordinator), server.grpc)
    add_CodeServiceServicer_to_server(CodeServicer(StoreShelf(kept), server), server.grpc)
    try:
        await coordinator.start()
        async with serve_enrolment(config.enrolment, config.tls, server):
            port = await server.start(config.listen, config.health)
            await server.set_ready(True)
            address = f"{config.listen.rpartition(':')[0]}:{port}"
            if config.port_file is not None:
                await asyncio.to_thread(write_atomic, config.port_file, address)
            log.info("coordinator listens on %s", address)
            async with serve_page(coordinator, registry):
                yield address, coordinator
    finally:
        await coordinator.stop()
        await server.stop()
        await shards.close()
        await asyncio.to_thread(kept.close)
