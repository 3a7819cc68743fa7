"""An aggregator process without its command line: data directory, gRPC and HTTP servers."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
from fedel_services.http import new_app, new_registry, serve_http
from fedel_services.job_code import CodeServicer
from fedel_services.runtime import Server
from fedel_services.threads import in_thread
from fedel_services.visitors import check_host

from fedel.errors import ServiceError
from fedel.files import write_atomic
from fedel.security.tls import host_of
from fedel.v1 import aggregator_pb2, aggregator_pb2_grpc
from fedel.v1.code_pb2_grpc import add_CodeServiceServicer_to_server
from fedel.wire.views import model_message, upload_message
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.errors import STATUSES
from fedel_aggregator.private_files import make_folder, open_private
from fedel_aggregator.servicer import Aggregator

log = logging.getLogger("fedel.aggregator")
SERVICE = aggregator_pb2.DESCRIPTOR.services_by_name["AggregatorService"].full_name


@asynccontextmanager
async def serve(config: AggregatorConfig) -> AsyncIterator[tuple[str, Aggregator]]:
    """Run an aggregator until the context ends, then stop it gracefully; gives its address once it is ready."""
    with lock_folder(config.data_dir):
        registry = new_registry("aggregator")
        server = Server([SERVICE], config.tls, registry, STATUSES)
        aggregator = Aggregator(config, registry)
        aggregator_pb2_grpc.add_AggregatorServiceServicer_to_server(aggregator, server.grpc)
        add_CodeServiceServicer_to_server(CodeServicer(aggregator.shelf, server), server.grpc)
        # They replace the generated handlers.
        server.grpc.add_registered_method_handlers(SERVICE, _bulk_handlers(aggregator))
        try:
            port = await server.start(config.listen, config.health)
            await in_thread(aggregator.load)
            await server.set_ready(True)
            address = f"{config.listen.rpartition(':')[0]}:{port}"
            if config.port_file is not None:
                await in_thread(write_atomic, config.port_file, address)
            log.info("aggregator listens on %s", address)
            names = check_host([host_of(config.http), *config.http_hosts])
            page = new_app(registry, aggregator.refresh, (names,))
            async with serve_http(page, config.http, config.http_port_file):
                yield address, aggregator
        finally:
            await server.stop()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Two processes that write one journal would destroy it. The lock ends with its process."""
    _keep_private(folder)
    with os.fdopen(open_private(folder / "lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ServiceError(
                f"{folder}: another aggregator uses this data_dir; stop it or choose another"
            ) from None
        yield


def _keep_private(folder: Path) -> None:
    """Let nobody else read models and updates, those of earlier versions included."""
    make_folder(folder)
    try:
        folder.chmod(0o700)
    except PermissionError:
        log.warning("%s belongs to another user: make sure that only FedEL can read it", folder)


def _bulk_handlers(aggregator: Aggregator) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Handlers of the bulk streams that copy fewer bytes than the generated ones (``fedel.wire.views``)."""
    put = grpc.stream_stream_rpc_method_handler(
        aggregator.PutUpdate, upload_message, aggregator_pb2.PutUpdateResponse.SerializeToString
    )
    get = grpc.unary_stream_rpc_method_handler(
        aggregator.GetModel, aggregator_pb2.GetModelRequest.FromString, model_message
    )
    return {"PutUpdate": put, "GetModel": get}
