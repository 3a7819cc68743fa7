"""Devices that freeze, links that break, answers that get lost: rounds go on, and nothing counts twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from fedel.chaos.proxy import Snare
from fedel.desk.submit import control
from fedel.v1 import coordinator_pb2 as pb
from tests.federation.processes import RUN, federation, gate_of
from tests.federation.support import (
    Servers,
    agents,
    create_run,
    job_of,
    model_of,
    servers,
    simulated,
    until,
    watching,
)
from tests.simulation.history import Script
from tests.strategies.fakes import same_bits

LARGE = 72
"""Scale of a model of 8 MB."""
DEADLINE_SECONDS = 2.0


def test_a_frozen_agent_is_left_out_and_counts_again_later(tmp_path: Path) -> None:
    job = job_of(
        {"name": "fedel"},
        num_clients=3,
        num_rounds=100_000,
        trainer="gated",
        options={"gate": str(tmp_path / "gate")},
        deadline_factor=1e-3,
        deadline_floor_seconds=DEADLINE_SECONDS,
    )
    gate = gate_of(job)
    gate.hold("client-2", 1)

    async def scenario() -> None:
        async with federation(tmp_path, job, 3, heartbeat_seconds=1.0) as made:
            watch, frozen = made.watch, made.agents[2]
            await watch.until(lambda: watch.done(1) == {"client-0", "client-1"}, "the others are done")
            frozen.send(signal.SIGSTOP)
            gate.release("client-2", 1)
            await watch.until(lambda: len(watch.records) >= 3, "rounds without the frozen agent")
            frozen.send(signal.SIGCONT)
            missed = len(watch.records)
            await watch.until(
                lambda: any("client-2" in clients for clients in watch.counted[missed:]), "it counts again"
            )
            await control(made.address, RUN, pb.RUN_ACTION_STOP)
            assert pb.RUN_PHASE_STOPPED == (await watch.ended()).phase
            assert ["client-0", "client-1", "client-2"] == watch.counted[0]
            assert ["client-0", "client-1"] == watch.counted[1]
            assert DEADLINE_SECONDS <= watch.records[1].collect_seconds < DEADLINE_SECONDS + 5
            # Its window goes on from round 0, the last in which it counted.
            # On the virtual clock no one is late: the clients that counted are those seen here.
            rounds = replace(job.rounds, num_rounds=len(watch.counted), deadline_floor_seconds=1e6)
            seen = replace(job, rounds=rounds)
            everyone = {f"client-{index}" for index in range(3)}
            away = {number: everyone - set(counted) for number, counted in enumerate(watch.counted)}
            expected = simulated(seen, 3, Script(away=away))
            assert same_bits(expected.model, await made.model())

    asyncio.run(scenario())


@asynccontextmanager
async def one_upload(folder: Path, kind: str, share: float) -> AsyncIterator[tuple[Servers, Snare, int]]:
    """A client sends the only update of a run into a snare at this share of its bytes.

    At the end the run must have finished, with this update in it once.
    """
    options = {"scale": LARGE, "gate": str(folder / "gate")}
    job = job_of({"name": "fedel"}, 1, 1, trainer="gated", options=options)
    gate, expected = gate_of(job), simulated(job, 1)
    gate.hold("client-0", 0)
    num_bytes = sum(p.values.nbytes for p in expected.counted[0]["client-0"].patches.values())
    async with servers(folder) as made:
        await create_run(made.address, RUN, job)
        async with agents(folder, made.address, range(1), 1), watching(made.address, RUN) as watch:
            await until(lambda: gate.times_trained("client-0", 0) == 1, "it trains")
            snare = made.proxy.set_snare(kind, int(share * num_bytes))
            gate.release("client-0", 0)
            await until(snare.caught.is_set, "the upload gets there")
            yield made, snare, num_bytes
            await watch.finished()
            assert [["client-0"]] == watch.counted
            assert 1 == gate.times_trained("client-0", 0)
            assert same_bits(expected.model, await model_of(made.address, RUN, folder))


def uploads(registry: CollectorRegistry, outcome: str) -> float | None:
    return registry.get_sample_value("fedel_uploads_total", {"outcome": outcome})


def test_an_upload_cut_at_half_does_not_send_its_first_half_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_upload(tmp_path, "cut", 0.5) as (made, _, num_bytes):
            registry = made.aggregators[0].registry
            await until(lambda: uploads(registry, "accepted") == 1, "the rest arrives")
            assert num_bytes < made.proxy.bytes_up < 1.2 * num_bytes
            assert num_bytes == registry.get_sample_value("fedel_upload_bytes_total")

    asyncio.run(scenario())


def test_an_update_with_a_lost_receipt_counts_once_and_is_not_sent_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_upload(tmp_path, "mute", 0.9995) as (made, snare, num_bytes):
            registry = made.aggregators[0].registry
            await until(lambda: uploads(registry, "accepted") == 1, "the update is committed")
            snare.released.set()
            await until(lambda: uploads(registry, "duplicate") == 1, "the client sends it again")
            assert num_bytes < made.proxy.bytes_up < 1.05 * num_bytes
            assert 1 == uploads(registry, "accepted")

    asyncio.run(scenario())
