"""What every service does the same way: start, listen, report its health, stop gracefully."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from grpc import aio
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from fedel import config
from fedel.errors import FedelError, ServiceError
from fedel.logs import set_up_logging
from fedel.security.certificates import utc_now
from fedel.security.folder import Credentials, Revocations, Watched, check_valid
from fedel.security.tls import Tls, add_options
from fedel.wire.channel import SERVER_OPTIONS, server_credentials
from fedel_services.errors import ErrorStatuses, Statuses
from fedel_services.errors import refuse as refuse
from fedel_services.first_messages import FirstMessages
from fedel_services.guard import Gatekeeper, Guard, SecretGuard
from fedel_services.health import Health
from fedel_services.request_ids import RequestIds
from fedel_services.revocation_list import Fetcher

log = logging.getLogger(__name__)
T = TypeVar("T")
GRACE_SECONDS = 10.0
"""How long running calls may still take when a service stops."""


class Server:
    """A gRPC server with health and reflection. It is not ready before ``set_ready``, nor while it stops."""

    def __init__(
        self,
        service_names: Sequence[str],
        tls: Tls,
        registry: CollectorRegistry,
        statuses: Statuses | None = None,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        """``statuses`` says how calls end with errors of the service's own classes; ``options`` are gRPC's."""
        self._tls = tls
        self._watched = Watched(tls.folder) if tls.secure else None
        self.keeper = Gatekeeper(registry, self._watched)
        guards: list[aio.ServerInterceptor] = []
        self._fetcher: Fetcher | None = None
        self.revocations: Revocations | None = None
        """Which certificates are revoked; none without TLS."""
        if self._watched:
            self.revocations = Revocations(tls.crl_path, self._watched)
            guards.append(Guard(self.keeper, self.revocations))
            if tls.crl_from:
                self._fetcher = Fetcher(tls, self.revocations, self.keeper.list_fetched)
        elif tls.secret:
            guards.append(SecretGuard(self.keeper, tls.secret))
        self._fetching: asyncio.Task[None] | None = None
        self.grpc = aio.server(
            interceptors=[RequestIds(), *guards, ErrorStatuses(statuses), FirstMessages()],
            # As a table: of two equal options gRPC would take the first.
            options=[*{**dict(SERVER_OPTIONS), **dict(options)}.items()],
        )
        self._health = Health()
        self._service_names = [*service_names]
        self._health_server: aio.Server | None = None
        self.port = 0
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            [*service_names, grpc_health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc
        )

    @property
    def credentials(self) -> Credentials | None:
        """This server's own; none without TLS."""
        return self._watched.current() if self._watched else None

    async def start(self, address: str, health: str = "") -> int:
        """Listen on ``host:port``, and on ``health`` if given; port 0 takes a free one. Returns the port."""
        await self.set_ready(False)
        log.log(
            logging.WARNING if self._tls.insecure_anywhere else logging.INFO, "%s", self._tls.check(address)
        )
        try:
            if self._watched:
                check_valid(self._watched.current().facts, self._tls.dir, utc_now())
                self.port = self.grpc.add_secure_port(address, server_credentials(self._watched))
            else:
                self.port = self.grpc.add_insecure_port(address)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ServiceError(f"cannot listen on {address}: choose a port that no other process uses")
        if health:
            self._health_server = self._serve_health(health)
            await self._health_server.start()
        await self.grpc.start()
        if self._fetcher is not None:
            self._fetching = asyncio.create_task(self._fetcher.run())
        return self.port

    def _serve_health(self, address: str) -> aio.Server:
        """Only health, in plain text: the kubelet and container engines have no certificate."""
        server = aio.server(interceptors=[ErrorStatuses()], options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            server.add_insecure_port(address)
        except RuntimeError:
            raise ServiceError(f"health = {address!r}: cannot listen there; choose a free port") from None
        return server

    async def set_ready(self, ready: bool) -> None:
        """Ready means that this service can take part in a round now."""
        status = health_pb2.HealthCheckResponse
        for name in ["", *self._service_names]:
            await self._health.set(name, status.SERVING if ready else status.NOT_SERVING)

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Take no new calls, and give those that run ``grace`` seconds to finish."""
        await self.set_ready(False)
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait({self._fetching})
        await self.grpc.stop(grace)
        if self._health_server is not None:
            await self._health_server.stop(None)


async def wait_for_stop_signal() -> None:
    """Return on SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def load_config(kind: type[T], path: str | None, overrides: Sequence[str]) -> T:
    """The settings of a file, or the defaults, with ``key=value`` overrides applied."""
    table = config.read(path) if path else {}
    for override in overrides:
        config.override_key(table, override)
    return config.parse(kind, table, path or "--set")


class Logged(Protocol):
    """What the settings of every service have."""

    @property
    def log_level(self) -> str: ...
    @property
    def log_json(self) -> bool: ...


def run_service(settings: Logged, service: AbstractAsyncContextManager[object]) -> int:
    """Run a service until SIGTERM or SIGINT; returns the exit code."""

    async def run() -> None:
        async with service:
            # Modules and settings never become garbage: the collector need not look at them again and again.
            gc.collect()
            gc.freeze()
            await wait_for_stop_signal()

    set_up_logging(settings.log_level, settings.log_json)
    # Models, updates and databases are for the service's own user.
    before = os.umask(0o077)
    try:
        asyncio.run(run())
    finally:
        os.umask(before)
    return 0


def main(
    name: str, start: Callable[[str | None, Sequence[str]], int], arguments: Sequence[str] | None = None
) -> int:
    """The command line of a service; errors for the user end with their exit code, without a traceback."""
    parser = argparse.ArgumentParser(prog=f"fedel {name}", epilog=f"example: --config configs/{name}.toml")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file; configs/{name}.toml explains every key")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override a setting")
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        return start(options.config, options.set)
    except FedelError as error:
        print(f"fedel {name}: {error}", file=sys.stderr)
        return error.exit_code
