"""The average over versions in a federation: what is tested, published and served."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from fedel.job import Server
from fedel.records import best_of
from tests.agents.trainers import score
from tests.federation.support import agents, create_run, job_of, model_of, servers, simulated, watching
from tests.strategies.fakes import same_bits

NUM_CLIENTS = 4


@pytest.mark.parametrize("num_aggregators", [1, 2])
def test_the_average_is_tested_and_published(tmp_path: Path, num_aggregators: int) -> None:
    plain = job_of({"name": "fedel", "damping": 0.5}, NUM_CLIENTS, 4, evaluate_every=1)
    job = replace(plain, server=Server(average=0.75))
    run = simulated(replace(job, rounds=replace(job.rounds, evaluate_every=0)), NUM_CLIENTS)
    assert not same_bits(run.model, run.published)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            made = await stack.enter_async_context(servers(tmp_path, num_aggregators))
            await create_run(made.address, "run", job)
            watch = await stack.enter_async_context(watching(made.address, "run"))
            await stack.enter_async_context(agents(tmp_path, made.address, range(NUM_CLIENTS), NUM_CLIENTS))
            await watch.finished()
            # The first version is its own average, and the last is not.
            tested = [record.accuracy for record in watch.records]
            assert [score(run.models[1], ()).accuracy, score(run.published, ()).accuracy] == [
                tested[0],
                tested[-1],
            ]
            assert score(run.model, ()).accuracy != tested[-1]
            assert same_bits(run.published, await model_of(made.address, "run", tmp_path))
            best = best_of(watch.records)
            assert best is not None
            kept = await model_of(made.address, "run", tmp_path, best.version)
            in_order = {name: kept[name] for name in run.published}
            assert best.accuracy == max(tested) == score(in_order, ()).accuracy

    asyncio.run(scenario())
