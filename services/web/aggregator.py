"""The aggregator over HTTP: its metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from services.aggregator.config import AggregatorConfig
from services.aggregator.servicer import Aggregator
from services.web.server import listening, new_app


@asynccontextmanager
async def showing(
    config: AggregatorConfig, aggregator: Aggregator, registry: CollectorRegistry
) -> AsyncIterator[str]:
    """Show an aggregator while the context lasts, if it is to be shown; gives the address, else nothing."""
    if not config.http:
        yield ""
        return
    async with listening(new_app(registry, aggregator.refresh), config.http, config.http_port_file) as address:
        yield address
