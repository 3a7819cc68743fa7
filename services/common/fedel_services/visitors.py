"""Who asks over HTTP: under which name, how often, and how long a connection may say nothing."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from fedel.security.tls import host_of
from fedel_services.rates import Rates

REQUEST_BURST, REQUEST_SECONDS = 300, 1 / 30
"""Requests from one address: this many at once, then one after each such time."""
FIRST_SECONDS = 15.0
"""A new connection sends a whole request within this time."""
NEXT_SECONDS = 300.0
"""A connection is kept this long for another request: longer than proxies keep theirs."""
UNREAD_SECONDS = 30.0
"""A visitor that reads nothing of an answer for this long has gone."""
CHECK_SECONDS = 1.0
MAX_CONNECTIONS = 200
"""Of one address."""


class Problem(Exception):
    """Ends a request with a status and a message that says what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def visitor(request: web.Request) -> str:
    """The address of the other side; behind a proxy that is the proxy's."""
    return request.remote or "unix"


def limit_requests() -> Middleware:
    rates = Rates(REQUEST_BURST, REQUEST_SECONDS)

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not rates.allow(visitor(request)):
            raise Problem(429, "too many requests from this address: wait some seconds, then ask again")
        return await handler(request)

    return limit


def check_host(hosts: Collection[str]) -> Middleware:
    """Refuse names that are not ours: a foreign page whose name points at this address asks under its own."""
    known = {"localhost", *(host.lower() for host in hosts)}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "localhost")
        if not is_known(host, known):
            raise Problem(
                421,
                f"this server is not known as {host[:100]!r}: use its address, or add the name to http_hosts",
            )
        return await handler(request)

    return check


def is_known(host: str, known: Collection[str]) -> bool:
    """Whether a Host header has a known name or an address; nobody can point an address elsewhere.

    >>> [is_known(h, {"localhost"}) for h in ("localhost:7080", "LocalHost", "10.0.0.7:7080", "[::1]:7080")]
    [True, True, True, True]
    >>> [is_known(h, {"localhost"}) for h in ("evil.example", "localhost.evil.example:7080", "")]
    [False, False, False]
    """
    name = host_of(host if host.rpartition(":")[2].isdigit() else f"{host}:").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in known
    return True


@dataclass
class _Connection:
    since: float
    """When it was opened, or its last request answered."""
    used: bool = False
    """Whether it has sent a whole request."""
    busy: bool = False
    unread: int = 0
    unread_since: float = 0.0

    def is_over(self, now: float, unread: int) -> bool:
        if unread != self.unread:
            self.unread, self.unread_since = unread, now
        if unread:
            return now - self.unread_since > UNREAD_SECONDS
        return not self.busy and now - self.since > (NEXT_SECONDS if self.used else FIRST_SECONDS)


class Connections:
    """Ends connections that send no whole request, do not read their answer, or are too many."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Protocol, _Connection] = {}

    def accept(self, make: Callable[[], asyncio.Protocol] | None) -> Callable[[], asyncio.Protocol]:
        """Makes the protocol of each new connection, and remembers it."""
        assert make is not None, "the runner is set up"

        def made() -> asyncio.Protocol:
            protocol = make()
            self._open[protocol] = _Connection(time.monotonic())
            return protocol

        return made

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = self._open.get(request.protocol)
        if connection is None:
            return await handler(request)
        connection.busy = connection.used = True
        try:
            return await handler(request)
        finally:
            connection.busy, connection.since = False, time.monotonic()

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._check(time.monotonic())

    def _check(self, now: float) -> None:
        by_host: Counter[str] = Counter()
        for protocol, connection in list(self._open.items()):
            transport = getattr(protocol, "transport", None)
            if transport is None:
                del self._open[protocol]
                continue
            host = (transport.get_extra_info("peername") or ("",))[0]
            by_host[host] += 1
            over = connection.is_over(now, transport.get_write_buffer_size())
            if over or by_host[host] > MAX_CONNECTIONS:
                transport.abort()
