"""The database of a coordinator, in SQLite: a cell or some bytes change, then a coordinator starts on it."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from itertools import count
from pathlib import Path
from random import Random

from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.shards import Shards
from fedel_coordinator.sql import SqlStore

from fedel.security.tls import Tls
from tests.fuzz import samples
from tests.fuzz.mutate import json_case, mutate_bytes, odd_value
from tests.fuzz.target import Read, Target, scratch
from tests.services.coordinator.support import Federation, run_config

_NOBODY = "127.0.0.1:1"
_TABLES = ("runs", "clients", "rounds", "reports")


@cache
def _sound() -> bytes:
    """A run in its second round, of which one report is in; another run has not begun."""

    async def play() -> None:
        async with Federation(folder) as made:
            await made.create(run_config(num_rounds=3, late="next", evaluate_every=0), samples.RUN)
            await made.create(run_config(), "other")
            agents = made.start_agents(3)
            agents[0].script[1] = "silent"
            await agents[1].until("closed", round_num=0)
            await made.status(lambda s: s.round_num == 1, samples.RUN)
            await asyncio.wait_for(reported(), 60)

    async def reported() -> None:
        """Reports of closed rounds are deleted: that of the second round has to be in."""
        with closing(sqlite3.connect(path)) as connection:
            while not connection.execute("SELECT 1 FROM reports WHERE round_num = 1").fetchall():
                await asyncio.sleep(0.05)

    folder = scratch()
    path = folder / "coordinator.db"
    asyncio.run(play())
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = DELETE")  # all of it in the one file
    connection.close()
    return path.read_bytes()


def _cell_case(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
    """Usually a cell gets another value, else any bytes of the file change."""
    if rng.random() < 0.4:
        return mutate_bytes(rng, valid, others)
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(valid)
        table = rng.choice(_TABLES)
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        rows = connection.execute(f"SELECT rowid, * FROM {table} ORDER BY rowid").fetchall()  # noqa: S608
        row, at = rng.choice(rows), rng.randrange(len(columns))
        new = _odd_cell(rng, row[at + 1])
        update = f"UPDATE {table} SET {columns[at]} = ? WHERE rowid = ?"  # noqa: S608
        connection.execute(update, (new, row[0]))
        connection.commit()
        return connection.serialize()
    except sqlite3.Error:  # such as a key that is there twice
        return mutate_bytes(rng, valid, others)
    finally:
        connection.close()


def _odd_cell(rng: Random, value: object) -> object:
    if isinstance(value, str) and value[:1] in "{[" and rng.random() < 0.8:
        return json_case(rng, value.encode()).decode("utf-8", "replace")
    odd = odd_value(rng, value)
    return odd if isinstance(odd, str | float) or (isinstance(odd, int) and abs(odd) < 2**63) else None


def _start(folder: Path) -> Read:
    numbers = count()

    async def started(path: Path) -> object:
        store = SqlStore(f"sqlite:///{path}")
        shards = Shards((_NOBODY,), Tls())
        coordinator = Coordinator(CoordinatorConfig(aggregators=(_NOBODY,)), store, shards)
        try:
            await coordinator.start()
            shown = await coordinator.shown_runs()
            return [(run.spec, run.view(), await run.clients()) for run in shown]
        finally:
            drives = [drive.exception() for drive in coordinator.drives.values() if drive.done()]
            await coordinator.stop()
            await shards.close()
            store.close()
            for error in filter(None, drives):
                raise error

    def read(data: bytes) -> object:
        # Each in a folder of its own: what a failed attempt left open may still have locks on its file.
        place = folder / str(next(numbers))
        place.mkdir()
        (place / "coordinator.db").write_bytes(data)
        try:
            return asyncio.run(started(place / "coordinator.db"))
        finally:
            shutil.rmtree(place)

    return read


DATABASE = (
    Target("coordinator_database", lambda: [_sound()], _cell_case, _start, seconds=2.0, megabytes=1024),
)
