"""Servers in this process that a test may stop, and start again elsewhere under the same addresses."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as serve_aggregator
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.server import serve as serve_coordinator

from fedel.backup.places import Places
from tests.federation.support import OWN

_NUMBERS = itertools.count()


@dataclass
class Servers:
    """``places`` changes with every start: an empty machine each time."""

    folder: Path
    num_aggregators: int = 2
    database_url: str = ""
    """Of PostgreSQL; else SQLite is used."""
    places: Places = field(default_factory=Places)

    def new_machine(self, database_url: str = "") -> Places:
        """Empty folders for servers that listen where the last ones did."""
        folder = self.folder / f"machine-{next(_NUMBERS)}"
        folder.mkdir()
        before = self.places
        aggregators = tuple(
            AggregatorConfig(
                listen=before.aggregators[index].listen if before.aggregators else "127.0.0.1:0",
                data_dir=folder / f"data-{index}",
                code=OWN,
            )
            for index in range(self.num_aggregators)
        )
        coordinator = CoordinatorConfig(
            listen=before.coordinator.listen if before.coordinator else "127.0.0.1:0",
            aggregators=tuple(config.listen for config in aggregators),
            database_url=database_url or self.database_url or f"sqlite:///{folder / 'coordinator.db'}",
            code=OWN,
        )
        self.places = Places(coordinator, aggregators)
        return self.places

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Gives the coordinator's address."""
        assert self.places.coordinator is not None
        async with AsyncExitStack() as stack:
            aggregators = []
            for config in self.places.aggregators:
                address, _ = await stack.enter_async_context(serve_aggregator(config))
                aggregators.append(replace(config, listen=address))
            addresses = tuple(config.listen for config in aggregators)
            coordinator = replace(self.places.coordinator, aggregators=addresses)
            address, _ = await stack.enter_async_context(serve_coordinator(coordinator))
            self.places = Places(replace(coordinator, listen=address), tuple(aggregators))
            yield address
