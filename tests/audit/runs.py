"""Small runs on real servers, for audits: their folders, and where an audit finds everything."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as serve_aggregator
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.server import serve as serve_coordinator

from fedel.audit.audit import Sources
from fedel.job import Protection, Server
from tests.federation.support import agents, create_run, job_of, watching

NUM_CLIENTS, NUM_ROUNDS = 3, 6
RUN = "night-1"


def sources(folder: Path, num_aggregators: int = 2, run: str = RUN) -> Sources:
    return Sources(
        run,
        tuple(folder / f"aggregator-{index}" for index in range(num_aggregators)),
        f"sqlite:///{folder / 'coordinator.db'}",
        folder / "runs" / run,
    )


def play(
    folder: Path,
    strategy: dict[str, Any],
    names: tuple[str, ...] = (RUN,),
    num_aggregators: int = 2,
    keep_updates: int = -1,
    protection: Protection | None = None,
    server: Server | None = None,
    **rounds: Any,
) -> Sources:
    """Play runs to their end, one after the other, on servers that are stopped then."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            addresses = []
            for index in range(num_aggregators):
                config = AggregatorConfig(
                    listen="127.0.0.1:0", data_dir=folder / f"aggregator-{index}", keep_updates=keep_updates
                )
                address, _ = await stack.enter_async_context(serve_aggregator(config))
                addresses.append(address)
            coordinator = CoordinatorConfig(
                listen="127.0.0.1:0",
                aggregators=tuple(addresses),
                database_url=f"sqlite:///{folder / 'coordinator.db'}",
                runs_dir=folder / "runs",
            )
            address, _ = await stack.enter_async_context(serve_coordinator(coordinator))
            await stack.enter_async_context(agents(folder, address, range(NUM_CLIENTS), NUM_CLIENTS))
            for seed, name in enumerate(names):
                job = job_of(strategy, NUM_CLIENTS, NUM_ROUNDS, seed=seed, evaluate_every=1, **rounds)
                job = replace(job, protection=protection or Protection(), server=server or Server())
                await create_run(address, name, job)
                async with watching(address, name) as watch:
                    await watch.finished()

    asyncio.run(scenario())
    return sources(folder, num_aggregators, names[0])
