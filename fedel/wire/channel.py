"""How the parts connect: channel options that hold memory flat, and retries with jitter."""

from __future__ import annotations

import random

import grpc
from grpc import aio

OPTIONS: list[tuple[str, int]] = [
    # Probing for bandwidth makes a server's memory grow with its clients.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 * 1024),
    # Cloud networks cut connections that are silent for four minutes.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ("grpc.so_reuseport", 0),
]
RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def connect(address: str) -> aio.Channel:
    """A channel to a service; it connects when first used and again whenever it broke."""
    # A server that was restarted is found again within seconds, not after gRPC's two minutes.
    # gRPC's own retries keep every message of a stream for as long as it lives; ours are in our hands.
    options = [*OPTIONS, ("grpc.max_reconnect_backoff_ms", 5_000), ("grpc.enable_retries", 0)]
    return aio.insecure_channel(address, options=options)


def backoff_seconds(attempt: int, longest: float = 30.0) -> float:
    """How long to wait before the next try: doubling, with jitter so that a fleet does not come at once."""
    return float(min(longest, 0.2 * 2**attempt) * random.uniform(0.5, 1.0))
