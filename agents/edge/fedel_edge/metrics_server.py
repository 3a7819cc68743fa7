"""An agent's own ``/metrics``, for a device that Prometheus can reach. Off unless ``http`` gives an address."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server

from fedel.errors import ServiceError
from fedel.telemetry import AgentMetrics, build_info

_log = logging.getLogger(__name__)


@contextmanager
def serve_metrics(address: str) -> Iterator[AgentMetrics]:
    """Metrics for an agent, served by a thread at ``host:port`` while the block runs; empty serves none."""
    registry = CollectorRegistry()
    metrics = AgentMetrics(registry)
    if not address:
        yield metrics
        return
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    build_info(registry, "agent")
    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host, registry)
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"http = {address!r}: cannot listen there ({error}); write host:port with a free port"
        ) from None
    _log.info("metrics on http://%s:%d/metrics", host, server.server_port)
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
