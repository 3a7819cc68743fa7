"""Backups while rounds are made as fast as they can be: each is of one moment, and a run goes on from it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fedel.backup import manifest, mirror
from fedel.backup.making import make
from fedel.backup.manifest import FileFacts, Manifest
from fedel.backup.mirror import copy_file
from fedel.backup.places import Places
from fedel.backup.restoring import restore
from fedel.chaos.postgres import fresh_database
from fedel.desk.submit import control
from fedel.job import RunConfig
from fedel.v1 import coordinator_pb2 as pb
from tests.backup.support import Servers
from tests.federation.support import agents, create_run, job_of, model_of, simulated, watching
from tests.strategies.fakes import same_bits

RUN, NUM_CLIENTS, NUM_ROUNDS = "night-1", 3, 60
SLOW_SECONDS = 0.02
"""For each file."""
Database = Callable[[], str]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Database:
    """Gives the URL of an empty database; none for SQLite, which is in the servers' folder."""
    if request.param == "sqlite":
        return lambda: ""
    server = request.getfixturevalue("postgres_server")
    return lambda: fresh_database(server)


def job() -> RunConfig:
    return job_of({"name": "fedel"}, NUM_CLIENTS, NUM_ROUNDS)


def slow_copy(source: Path, target: Path) -> FileFacts:
    """A disk so slow that rounds would go by during the last copies, if they could."""
    time.sleep(SLOW_SECONDS)
    return copy_file(source, target)


async def back_up_while_it_runs(address: str, servers: Servers, times: int = 3) -> list[Path]:
    made = []
    async with watching(address, RUN) as watch:
        for number in range(times):
            before = len(watch.records)
            await watch.until(lambda before=before: len(watch.records) > before + 1, "some rounds")
            made.append(servers.folder / f"backup-{number}")
            await asyncio.to_thread(make, made[-1], servers.places)
        before = len(watch.records)
        await watch.until(lambda: len(watch.records) > before + 1, "rounds after the last backup")
    return made


def check_sound(made: list[Path]) -> None:
    found: list[Manifest] = [manifest.read(folder) for folder in made]
    for folder, each in zip(made, found, strict=True):
        manifest.verify(folder, each)
        assert [] == manifest.mismatches([each])
        assert {"aggregator-0", "aggregator-1"} == each.runs[RUN].aggregators.keys()
    rounds = [each.runs[RUN].database or 0 for each in found]
    assert sorted(set(rounds)) == rounds, "rounds went on between the backups"


# A server that stops in mid-run leaves a thread with a connection behind, for a moment.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_goes_on_from_a_backup_that_was_made_under_load(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers start again on an empty machine. The devices went on for rounds that now never happened."""
    monkeypatch.setattr(mirror, "copy_file", slow_copy)
    servers = Servers(tmp_path)
    servers.new_machine(database())

    async def scenario() -> None:
        async with AsyncExitStack() as fleet:
            async with servers.running() as address:
                await create_run(address, RUN, job())
                await fleet.enter_async_context(agents(tmp_path, address, range(NUM_CLIENTS), NUM_CLIENTS))
                made = await back_up_while_it_runs(address, servers)
            check_sound(made)
            servers.new_machine(database())
            await asyncio.to_thread(restore, made[1], servers.places)
            async with servers.running() as again, watching(again, RUN) as watch:
                assert address == again
                await watch.finished()
                assert list(range(NUM_ROUNDS)) == [record.round for record in watch.records]
                assert [NUM_CLIENTS] * NUM_ROUNDS == [record.num_updates for record in watch.records]
                model = await model_of(again, RUN, tmp_path)
                await fleet.aclose()
        assert same_bits(simulated(job(), NUM_CLIENTS).published, model)

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_restore_of_the_aggregators_alone_is_named(tmp_path: Path, database: Database) -> None:
    servers = Servers(tmp_path)
    servers.new_machine(database())

    async def scenario() -> None:
        async with AsyncExitStack() as fleet:
            async with servers.running() as address:
                await create_run(address, RUN, job())
                await fleet.enter_async_context(agents(tmp_path, address, range(NUM_CLIENTS), NUM_CLIENTS))
                (made,) = await back_up_while_it_runs(address, servers, times=1)
            alone = Places(None, servers.places.aggregators)
            await asyncio.to_thread(restore, made, alone, force=True)
            rounds = manifest.read(made).runs[RUN].aggregators["aggregator-0"]
            async with servers.running() as again, watching(again, RUN) as watch:
                await watch.until(lambda: watch.status.phase == pb.RUN_PHASE_PAUSED, "it pauses")
                at = rf"aggregator \S+ is at round {rounds} of run '{RUN}', the database at \d+: restore"
                assert re.match(at, watch.status.message), watch.status.message
                await control(again, RUN, pb.RUN_ACTION_STOP)
                assert pb.RUN_PHASE_STOPPED == (await watch.ended()).phase
                await fleet.aclose()

    asyncio.run(scenario())
