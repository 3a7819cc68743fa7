"""The benchmark of a large fleet, small: nothing fails, memory stays, and the model is the right one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.fleet import job, measure
from tests.federation.support import simulated
from tests.strategies.fakes import same_bits

NUM_AGENTS, NUM_ROUNDS, SCALE = 20, 5, 12


def test_twenty_agents_train_five_rounds_without_an_error_or_a_leak(tmp_path: Path) -> None:
    figures, model = asyncio.run(measure(NUM_AGENTS, NUM_ROUNDS, 2, SCALE, tmp_path))
    assert [NUM_AGENTS] * NUM_ROUNDS == figures.num_updates
    assert {"done": NUM_AGENTS * NUM_ROUNDS} == figures.counts
    assert 0 == figures.complaints
    assert same_bits(simulated(job(NUM_AGENTS, NUM_ROUNDS, SCALE), NUM_AGENTS).model, model)
    # Kept updates would be 20 x 80 kB per round; the servers' caches have filled after the first rounds.
    growth = {name: sizes[-1] - sizes[1] for name, sizes in figures.rss.items()}
    assert {name for name, size in growth.items() if size > 20e6} == set()
