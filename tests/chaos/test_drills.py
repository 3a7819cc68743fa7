"""Drills with fixed seeds: real processes, disturbed as the seed says, end as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable
from pathlib import Path

import pytest

from fedel.chaos.disk import can_mount, fill, free, small_disk
from fedel.chaos.drill import draw, run_drill
from fedel.chaos.faults import KILL, RESTART, Fault, draw_fault, strike
from fedel.chaos.federation import Federation, Layout, database_for
from fedel.chaos.postgres import Postgres, binaries
from fedel.chaos.verdict import Outcome
from fedel.cli.main import main
from fedel.seeds import generator

FAST = (2, 5, 53)
"""Together they have every kind of fault that SQLite allows."""
WITHOUT_SERVER = ("kill", "freeze", "clock", "cut", "hold", "delay", "throttle", "damage", "full disk")
FAILED_ONCE: tuple[int, ...] = (16, 6012)
"""Seeds of drills that were not sound at some time."""
TWO_RESTARTS = 1025
"""Of the database, one during the other, with PostgreSQL; that was not sound once, too."""


def said(outcome: Outcome) -> str:
    return "\n".join([outcome.what, *outcome.timeline, *outcome.problems])


@pytest.mark.parametrize("seed", [*FAST, *FAILED_ONCE])
def test_drill_is_sound(tmp_path: Path, seed: int) -> None:
    outcome = asyncio.run(run_drill(draw(seed), tmp_path))
    assert outcome.sound, said(outcome)
    assert outcome.num_rounds == outcome.num_recomputed > 0
    assert outcome.num_faults > 0


def test_drill_on_postgresql_with_two_aggregators(tmp_path: Path) -> None:
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: no initdb and pg_ctl on PATH or under /usr/lib/postgresql")
    drill = draw(TWO_RESTARTS, 3, 2, "postgresql")
    with database_for(drill.layout) as database:
        outcome = asyncio.run(run_drill(drill, tmp_path, database))
    assert outcome.sound, said(outcome)


def test_command_says_what_it_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert 0 == main(["chaos", "--seed", "3", "--aggregators", "1", "--out", str(tmp_path), "--json"])
    (outcome,) = json.loads(capsys.readouterr().out)
    assert ([], 3) == (outcome["problems"], outcome["seed"])
    assert outcome["timeline"][-1].endswith("run finished")
    assert (tmp_path / "seed-3" / "client-0.log").exists()


def test_seed_decides_everything() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert {1, 2} == {draw(seed).layout.num_aggregators for seed in range(10)}


def test_every_fault_is_drawn() -> None:
    rng = generator(0, "test")
    layout = Layout(3, 2, "postgresql")
    drawn = {draw_fault(rng, layout, 0).kind for _ in range(500)}
    assert {*WITHOUT_SERVER, RESTART} == drawn
    assert {*WITHOUT_SERVER} == {draw_fault(rng, Layout(), 0).kind for _ in range(500)}
    assert {*WITHOUT_SERVER} == {fault.kind for seed in FAST for fault in draw(seed).faults}


def test_soak_kills_no_server_while_it_measures() -> None:
    rng = generator(0, "test")
    faults = [draw_fault(rng, Layout(5, 2), 0, servers_live=True) for _ in range(300)]
    assert all(fault.target.startswith("client-") for fault in faults if fault.kind == KILL)


class FakeDatabase(Postgres):
    """A server that is asked to stop only while it runs, and to start only while it does not."""

    def __init__(self) -> None:
        self.runs, self.num_stops = True, 0

    def stop(self) -> None:
        assert self.runs
        self.runs, self.num_stops = False, self.num_stops + 1

    def start(self) -> None:
        assert not self.runs
        self.runs = True


def restart(made: Federation, seconds: float = 0.01) -> Awaitable[str]:
    return asyncio.ensure_future(strike(made, Fault(0, 0.0, RESTART, "database", seconds)))


def test_restarts_of_the_database_wait_for_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = Federation(Layout(), tmp_path, database=database)
        await asyncio.gather(restart(made), restart(made))

    database = FakeDatabase()
    asyncio.run(scenario())
    assert (True, 2) == (database.runs, database.num_stops)


def test_database_runs_again_when_a_drill_is_cut_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(restart(Federation(Layout(), tmp_path, database=database), 60), 0.2)

    database = FakeDatabase()
    asyncio.run(scenario())
    assert (True, 1) == (database.runs, database.num_stops)


def test_full_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", megabytes=4) as mounted:
        if not mounted:
            assert not can_mount()
            return
        assert 4 << 20 == shutil.disk_usage(tmp_path / "disk").total
        fill(tmp_path / "disk")
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "disk" / "more").write_bytes(b"x" * 10_000)
        free(tmp_path / "disk")
        (tmp_path / "disk" / "more").write_bytes(b"x" * 10_000)
    assert 10_000 == (tmp_path / "disk" / "more").stat().st_size
