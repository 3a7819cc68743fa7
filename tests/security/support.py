"""A federation with certificates on free ports of the loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as aggregating
from fedel_aggregator.servicer import Aggregator
from fedel_coordinator.config import CoordinatorConfig, EnrolmentConfig
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.server import serve as coordinating
from grpc import aio

from fedel.plugins import Allowed
from fedel.security import authority
from fedel.security import certificates as x
from fedel.security.authority import Authority
from fedel.security.folder import ensure_key, install
from fedel.security.identity import Identity
from fedel.security.tls import Tls
from fedel.wire.streams import reason_of

HOSTS = ("127.0.0.1", "localhost")


class Pki:
    """An authority, and folders with certificates of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.create(folder / "ca")

    def tls(self, role: str, name: str, days: float = 0.0) -> Tls:
        folder = self.folder / f"{role}-{name}"
        hosts = HOSTS if role == "service" else ()
        self.authority.issue(folder, Identity(role, name), hosts, days)
        return Tls(dir=str(folder), crl=str(self.authority.folder / "crl.pem"))

    def due(self, role: str, name: str, days: float = 30.0) -> Tls:
        """A certificate of which three quarters of the time have passed."""
        folder, then = self.folder / f"{role}-{name}", x.utc_now() - timedelta(days=days * 3 / 4)
        hosts = HOSTS if role == "service" else ()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(authority, "utc_now", lambda: then)
            request = x.new_request(ensure_key(folder))
            cert = self.authority.sign(request, Identity(role, name), hosts, days)
        install(folder, x.to_pem(self.authority.ca), cert)
        return Tls(dir=str(folder), crl=str(self.authority.folder / "crl.pem"))

    def expired(self, role: str, name: str) -> Tls:
        folder = self.folder / f"{role}-{name}-expired"
        ca, identity, then = self.authority.ca, Identity(role, name), x.utc_now() - timedelta(days=31)
        key = ensure_key(folder)
        cert = x.sign(self.authority._key, ca, key.public_key(), identity, (), 30, then)
        install(folder, x.to_pem(ca), x.to_pem(cert))
        return Tls(dir=str(folder))


@dataclass(frozen=True)
class Servers:
    pki: Pki
    coordinator_address: str
    enrolment_address: str
    aggregator_address: str
    coordinator: Coordinator
    aggregator: Aggregator
    http: str
    """Where the coordinator shows its metrics."""

    async def refused(self, reason: str) -> float:
        """Calls that the coordinator did not let in."""
        return await self.metric(f'fedel_calls_refused_total{{reason="{reason}"}}')

    async def metric(self, name: str) -> float:
        async with ClientSession() as session, session.get(f"http://{self.http}/metrics") as answer:
            text = await answer.text()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


@asynccontextmanager
async def servers(
    folder: Path,
    pki: Pki,
    aggregator_tls: Tls | None = None,
    aggregator_code: Allowed | None = None,
    keep_updates: int = 0,
    **settings: Any,
) -> AsyncIterator[Servers]:
    port_file, http_file = folder / "enrolment.address", folder / "http.address"
    async with AsyncExitStack() as stack:
        tls = aggregator_tls or pki.tls("service", "aggregator")
        code = aggregator_code or Allowed()
        aggregator_config = AggregatorConfig(
            listen="127.0.0.1:0", data_dir=folder / "aggregator", tls=tls, code=code, keep_updates=keep_updates
        )
        bulk, aggregator = await stack.enter_async_context(aggregating(aggregator_config))
        config = CoordinatorConfig(
            listen="127.0.0.1:0",
            aggregators=(bulk,),
            database_url=f"sqlite:///{folder / 'coordinator.db'}",
            http="127.0.0.1:0",
            http_port_file=http_file,
            tls=pki.tls("service", "coordinator"),
            enrolment=EnrolmentConfig(str(pki.authority.folder), "127.0.0.1:0", port_file),
            **settings,
        )
        address, coordinator = await stack.enter_async_context(coordinating(config))
        enrolment, http = port_file.read_text(), http_file.read_text()
        yield Servers(pki, address, enrolment, bulk, coordinator, aggregator, http)


async def refusal(awaitable: Any) -> tuple[str, str]:
    """Status and reason of a call that must fail."""
    with pytest.raises(aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code().name, reason_of(caught.value)
