"""What every FedEL server does the same way: listen, tell its health, and go down gracefully."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from fedel.errors import ServiceError
from fedel.security.certificates import utc_now
from fedel.security.folder import Revocations, Watched, check_valid
from fedel.security.tls import Tls
from fedel.wire.channel import SERVER_OPTIONS, server_credentials
from fedel_services.errors import ErrorStatuses, Statuses
from fedel_services.errors import refuse as refuse
from fedel_services.guard import Gatekeeper, Guard
from fedel_services.health import Health

log = logging.getLogger(__name__)
GRACE_SECONDS = 10.0


class Server:
    """A gRPC server with health and reflection. Not ready until told so, and not ready again while it stops."""

    def __init__(
        self,
        service_names: Sequence[str],
        tls: Tls,
        registry: CollectorRegistry,
        statuses: Statuses | None = None,
    ) -> None:
        """``statuses`` says how calls end with errors of the service's own classes."""
        self._tls = tls
        self._watched = Watched(tls.folder) if tls.secure else None
        self.keeper = Gatekeeper(registry, self._watched)
        guards = [Guard(self.keeper, Revocations(tls.crl_path, self._watched))] if self._watched else []
        self.grpc = aio.server(interceptors=[*guards, ErrorStatuses(statuses)], options=SERVER_OPTIONS)
        self._health = Health()
        self._service_names = [*service_names]
        self._probed: aio.Server | None = None
        self.port = 0
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.grpc
        )

    async def start(self, address: str, probes: str = "") -> int:
        """Listen on ``host:port``, and on ``probes`` if given; port 0 takes a free one. Returns the port."""
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
            raise ServiceError(f"cannot listen on {address}: is another process using the port?")
        if probes:
            self._probed = self._prober(probes)
            await self._probed.start()
        await self.grpc.start()
        return self.port

    def _prober(self, address: str) -> aio.Server:
        """The kubelet and container engines have no certificate to show: health alone, in plain text."""
        server = aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            server.add_insecure_port(address)
        except RuntimeError:
            raise ServiceError(f"health = {address!r}: cannot listen there; choose a free port") from None
        return server

    async def set_ready(self, ready: bool) -> None:
        """Readiness means: this service can take part in a round now."""
        status = health_pb2.HealthCheckResponse
        for name in ["", *self._service_names]:
            await self._health.set(name, status.SERVING if ready else status.NOT_SERVING)

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Finish the calls that are under way, for a while; take no new ones."""
        await self.set_ready(False)
        await self.grpc.stop(grace)
        if self._probed is not None:
            await self._probed.stop(None)


def write_address(path: Path, address: str) -> None:
    """All of it or nothing: whoever waits for the file reads it as soon as it is there."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(address, encoding="utf-8")
    temporary.replace(path)


async def until_told_to_stop() -> None:
    """Return on SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
