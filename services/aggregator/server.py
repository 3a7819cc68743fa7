"""An aggregator that listens: its data directory locked, its runs taken up, its health told."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from fedel.errors import ServiceError
from fedel.v1 import aggregator_pb2, aggregator_pb2_grpc
from services.aggregator.config import AggregatorConfig
from services.aggregator.files import write_file
from services.aggregator.servicer import Aggregator
from services.aggregator.uploads import in_thread
from services.runtime import Server

log = logging.getLogger("fedel.aggregator")
SERVICE = aggregator_pb2.DESCRIPTOR.services_by_name["AggregatorService"].full_name


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two processes that write one journal would destroy it. The lock goes with its process in any case."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ServiceError(
                f"{folder}: another aggregator uses this data_dir; stop it or choose another"
            ) from None
        yield


@asynccontextmanager
async def serving(config: AggregatorConfig) -> AsyncIterator[tuple[str, Aggregator]]:
    """A server that is ready, with its address; on leaving it stops gracefully."""
    with _locked(config.data_dir):
        server, aggregator = Server([SERVICE]), Aggregator(config)
        aggregator_pb2_grpc.add_AggregatorServiceServicer_to_server(aggregator, server.grpc)
        port = await server.start(config.listen)
        try:
            await in_thread(aggregator.load)
            await server.set_ready(True)
            address = f"{config.listen.rpartition(':')[0]}:{port}"
            if config.port_file is not None:
                write_file(config.port_file, address.encode())
            log.info("aggregator listens on %s", address)
            yield address, aggregator
        finally:
            await server.stop()
