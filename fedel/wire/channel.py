"""How the parts connect: mutual TLS, and channel options that keep memory flat."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
from grpc import aio

from fedel import request_id
from fedel.security.folder import Credentials, Watched, load
from fedel.security.secret import HEADER
from fedel.security.tls import Tls

OPTIONS: list[tuple[str, int]] = [
    # Probing for bandwidth makes a server's memory grow with the number of clients.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 * 1024),
    # Cloud networks cut connections that are silent for four minutes.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
SERVER_OPTIONS: list[tuple[str, int]] = [
    *OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    # A connection that says nothing, or on which nobody calls, is ended; a channel connects again by itself.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.so_reuseport", 0),
]


def connect(address: str, tls: Tls | None = None) -> aio.Channel:
    """A channel to a service; it connects when first used, and again after a break."""
    tls = tls or Tls()
    tls.check(address)
    return _channel(address, load(tls.folder) if tls.secure else None, tls.secret)


def _channel(address: str, own: Credentials | None, secret: str, near: bool = False) -> aio.Channel:
    # A server can come back at another address, as a restarted pod does. gRPC would try the old address for
    # 20 s, look the name up at most every 30 s, and wait up to two minutes between tries. A device on a bad
    # link needs seconds for a try; and not all devices should come at once.
    try_ms, wait_ms = (3_000, 2_000) if near else (10_000, 5_000)
    options = [
        *OPTIONS,
        ("grpc.min_reconnect_backoff_ms", try_ms),  # how long a try may take, in spite of the name
        ("grpc.max_reconnect_backoff_ms", wait_ms),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        # gRPC's own retries keep every message of a stream in memory as long as it lives; `retry.py` does not.
        ("grpc.enable_retries", 0),
        # Else gRPC gives a new channel the connection of another, even of one that was just closed.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if own is None:
        return with_metadata(aio.insecure_channel(address, options=options), secret)
    credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.cert)
    return with_metadata(aio.secure_channel(address, credentials, options=options))


def with_metadata(channel: aio.Channel, secret: str = "") -> aio.Channel:
    """The channel; from now on all its calls carry the id of the request, and the secret if there is one.

    Interceptors of grpc.aio could do it, but put a queue and a task into every stream.
    """
    for kind in _KINDS:
        setattr(channel, kind, _carrying(getattr(channel, kind), ((HEADER, secret),) if secret else ()))
    return channel


def _carrying(make: Callable[..., Callable[..., Any]], metadata: tuple[tuple[str, str], ...]) -> Any:
    def method(*arguments: Any, **options: Any) -> Callable[..., Any]:
        call = make(*arguments, **options)
        return lambda *given, **kept: call(*given, metadata=(*metadata, request_id.to_send()), **kept)

    return method


class Dialer:
    """Channels of a process that lives longer than its certificate: made again after each renewal.

    ``near`` is for servers of one network: a try to connect ends sooner, and the next comes sooner. At the end
    of a ``with``, the connections end.
    """

    def __init__(self, tls: Tls | None = None, near: bool = False, watched: Watched | None = None) -> None:
        self.tls = tls or Tls()
        self._near = near
        self._watched = watched or (Watched(self.tls.folder) if self.tls.secure else None)
        self._used = self._watched.current() if self._watched else None
        self._secret = self.tls.secret
        self._channels: dict[str, aio.Channel] = {}
        self._retired: list[aio.Channel] = []
        self._closing: list[asyncio.Future[None]] = []

    @property
    def credentials(self) -> Credentials | None:
        """As they are on disk now; none without TLS."""
        return self._watched.current() if self._watched else None

    def channel(self, address: str) -> aio.Channel:
        if self.credentials is not self._used:
            self._renew()
        if address not in self._channels:
            self.tls.check(address)
            self._channels[address] = _channel(address, self._used, self._secret, self._near)
        return self._channels[address]

    def _renew(self) -> None:
        self._used = self.credentials
        # Calls may still be running on the current channels; the ones before them have been idle for weeks.
        self._closing = [asyncio.ensure_future(channel.close()) for channel in self._retired]
        self._retired = list(self._channels.values())
        self._channels = {}

    def beside(self) -> Dialer:
        """Another one with the same credentials, for connections that end earlier."""
        return Dialer(self.tls, self._near, self._watched)

    async def __aenter__(self) -> Dialer:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        for channel in (*self._retired, *self._channels.values()):
            await channel.close()


def server_credentials(watched: Watched, client_certificates: bool = True) -> grpc.ServerCredentials:
    """What a port presents and requires; every new connection uses the files as they are at that time.

    gRPC asks from its own threads, at every handshake, and is told only of what is new: each configuration that
    it gets replaces the one before, which another handshake may be using at that moment; the process then dies.
    """
    used, lock = watched.current(), threading.Lock()

    def configuration(own: Credentials) -> grpc.ServerCertificateConfiguration:
        ca = own.ca if client_certificates else None
        return grpc.ssl_server_certificate_configuration([(own.key, own.cert)], ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        with lock:
            own = watched.current()
            if own is used:
                return None
            used = own
        return configuration(own)

    # The type stubs of gRPC do not know that the answer can be none, for no change.
    return grpc.dynamic_ssl_server_credentials(configuration(used), changed, client_certificates)  # type: ignore[arg-type]
