"""An aggregator that listens: its data directory locked, its runs taken up, its health told."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
from fedel_services.http import new_registry
from fedel_services.runtime import Server

from fedel.errors import ServiceError
from fedel.telemetry import AggregatorMetrics
from fedel.v1 import aggregator_pb2, aggregator_pb2_grpc
from fedel.wire.views import model_message, upload_message
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.files import write_file
from fedel_aggregator.page import showing
from fedel_aggregator.servicer import Aggregator
from fedel_aggregator.uploads import in_thread

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


def _with_fewer_copies(aggregator: Aggregator) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Handlers of the bulk streams as they are generated, but for how chunks are read and made."""
    put = grpc.stream_stream_rpc_method_handler(
        aggregator.PutUpdate, upload_message, aggregator_pb2.PutUpdateResponse.SerializeToString
    )
    get = grpc.unary_stream_rpc_method_handler(
        aggregator.GetModel, aggregator_pb2.GetModelRequest.FromString, model_message
    )
    return {"PutUpdate": put, "GetModel": get}


@asynccontextmanager
async def serving(config: AggregatorConfig) -> AsyncIterator[tuple[str, Aggregator]]:
    """A server that is ready, with its address; on leaving it stops gracefully."""
    with _locked(config.data_dir):
        registry = new_registry("aggregator")
        server = Server([SERVICE], config.tls, registry)
        aggregator = Aggregator(config, AggregatorMetrics(registry))
        aggregator_pb2_grpc.add_AggregatorServiceServicer_to_server(aggregator, server.grpc)
        # In place of the generated ones, which go before any generic handler.
        server.grpc.add_registered_method_handlers(SERVICE, _with_fewer_copies(aggregator))
        try:
            port = await server.start(config.listen, config.health)
            await in_thread(aggregator.load)
            await server.set_ready(True)
            address = f"{config.listen.rpartition(':')[0]}:{port}"
            if config.port_file is not None:
                write_file(config.port_file, address.encode())
            log.info("aggregator listens on %s", address)
            async with showing(config, aggregator, registry):
                yield address, aggregator
        finally:
            await server.stop()
