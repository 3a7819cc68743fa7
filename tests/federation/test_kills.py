"""``kill -9`` of each process at each moment of a round: nothing acknowledged is lost, nothing counts twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fedel.job import RunConfig, Server
from fedel.types import UploadSettings
from tests.federation.processes import Federation, federation, gate_of
from tests.federation.support import job_of, simulated, until
from tests.federation.trainers import Gate
from tests.simulation.history import History
from tests.strategies.fakes import same_bits

NUM_CLIENTS, NUM_ROUNDS, ROUND = 3, 3, 1
CLIENTS = [f"client-{index}" for index in range(NUM_CLIENTS)]
TOP, INT8 = {"upload": UploadSettings("topk")}, {"upload": UploadSettings("int8")}
MEAN = {"server": Server(average=0.75, momentum=0.3)}
LARGE = 72
"""Scale of a model of 8 MB."""
VICTIMS = ("coordinator", "aggregator", "agent")
MOMENTS = ("before the upload", "during the upload", "after the acknowledgement")
FAST = set(zip(VICTIMS, MOMENTS, strict=True))
"""Each process once and each moment once; the other six are slow tests."""


def job_in(gate: str, scale: int, **settings: Any) -> RunConfig:
    options = {"gate": gate, "scale": scale}
    job = job_of({"name": "fedel"}, NUM_CLIENTS, NUM_ROUNDS, trainer="gated", options=options)
    return replace(job, **settings)


@lru_cache(maxsize=3)
def undisturbed(scale: int, **settings: Any) -> History:
    return simulated(job_in("", scale, **settings), NUM_CLIENTS)


def upload_bytes(scale: int, client: str) -> int:
    patches = undisturbed(scale).counted[ROUND][client].patches
    return sum(patch.values.nbytes for patch in patches.values())


async def strike(made: Federation, victim: str) -> None:
    """Kill the process and start it again; the first client's, if it is an agent."""
    process = {"coordinator": made.coordinator, "aggregator": made.aggregator, "agent": made.agents[0]}[victim]
    process.kill()
    process.start()


async def before_the_upload(made: Federation, gate: Gate, victim: str) -> None:
    """The first client trains; the updates of the others are acknowledged."""
    await made.watch.until(lambda: set(CLIENTS[1:]) == made.watch.done(ROUND), "the others are done")
    await until(lambda: gate.times_trained(CLIENTS[0], ROUND) == 1, "the first client trains")
    await strike(made, victim)
    gate.release(CLIENTS[0], ROUND)


async def during_the_upload(made: Federation, gate: Gate, victim: str) -> None:
    """More than half of the first client's update has passed; those of the others are acknowledged."""
    await made.watch.until(lambda: set(CLIENTS[1:]) == made.watch.done(ROUND), "the others are done")
    snare = made.proxy.set_snare("hold", upload_bytes(LARGE, CLIENTS[0]) * 2 // 3)
    gate.release(CLIENTS[0], ROUND)
    await until(snare.caught.is_set, "the upload is on its way")
    await strike(made, victim)
    snare.released.set()


async def after_the_acknowledgement(made: Federation, gate: Gate, victim: str) -> None:
    """The first client's update is acknowledged; the last one's, for which the round waits, is not."""
    await made.watch.until(lambda: set(CLIENTS[:-1]) == made.watch.done(ROUND), "all but the last are done")
    await strike(made, victim)
    gate.release(CLIENTS[-1], ROUND)


@pytest.mark.parametrize(
    ("victim", "moment", "settings"),
    [
        pytest.param(*case, {}, marks=[] if case in FAST else pytest.mark.slow, id=" ".join(case))
        for case in product(VICTIMS, MOMENTS)
    ]
    + [
        # What the killed agent had not sent yet, its residuals, counts once: what is done again is the same.
        pytest.param("agent", MOMENTS[0], TOP, id="agent before the upload, compressed"),
        pytest.param("agent", MOMENTS[2], TOP, id="agent after the acknowledgement, compressed"),
        pytest.param("aggregator", MOMENTS[2], INT8, id="aggregator after the acknowledgement, compressed"),
        pytest.param("aggregator", MOMENTS[2], MEAN, id="aggregator after the acknowledgement, averaged"),
    ],
)
def test_the_run_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, victim: str, moment: str, settings: dict[str, Any]
) -> None:
    scale = LARGE if moment == MOMENTS[1] else 1
    job = job_in(str(tmp_path / "gate"), scale, **settings)
    gate = gate_of(job)
    held = CLIENTS[-1] if moment == MOMENTS[2] else CLIENTS[0]
    gate.hold(held, ROUND)
    scene = dict(zip(MOMENTS, (before_the_upload, during_the_upload, after_the_acknowledgement), strict=True))

    async def scenario() -> None:
        async with federation(tmp_path, job, NUM_CLIENTS) as made:
            await scene[moment](made, gate, victim)
            await made.watch.finished()
            assert [CLIENTS] * NUM_ROUNDS == made.watch.counted
            assert same_bits(undisturbed(scale, **settings).published, await made.model())

    asyncio.run(scenario())
    again = {(CLIENTS[0], ROUND)} if (victim, moment) == ("agent", MOMENTS[0]) else set()
    trained = {key: gate.times_trained(*key) for key in product(CLIENTS, range(NUM_ROUNDS))}
    assert {key: 1 + (key in again) for key in trained} == trained
