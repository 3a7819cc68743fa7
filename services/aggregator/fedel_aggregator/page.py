"""The aggregator over HTTP: its metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fedel_services.http import listening, new_app
from prometheus_client import CollectorRegistry

from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.servicer import Aggregator


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
