"""What the coordinator costs: rounds with up to 1,000 clients at work, and thousands of sessions that idle."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import AgentRow

from fedel.bench.light_federation import DATABASE, light_federation, light_job
from fedel.bench.page import table
from fedel.bench.section import Goal, Options, Row, Rows, Say, Section
from fedel.bench.slopes import log_log, slope, told
from fedel.wire.protocol import PROTOCOL

CLIENTS = (10, 100, 1000)
NUM_ROUNDS, WARM_ROUNDS = 20, 2
NUM_IDLE, NUM_REGISTERED = 5000, 10_000
IDLE_SECONDS = 30.0
MAX_IDLE_SHARE = 0.2
"""Of a core."""


def measure(options: Options, say: Say) -> Iterator[Row]:
    wanted: dict[str, Callable[[Path], Awaitable[Row]]] = {
        f"{number} clients": partial(active, number, NUM_ROUNDS) for number in CLIENTS
    }
    wanted["idle sessions"] = partial(idle, NUM_IDLE)
    wanted["registered agents"] = partial(registered, NUM_REGISTERED)
    if options.quick:
        wanted = {"10 clients": partial(active, 10, 8), "100 clients": partial(active, 100, 8)}
    for what, make in wanted.items():
        if what not in options.done:
            say(f"coordinator: {what}")
            folder = options.folder / what.replace(" ", "-")
            folder.mkdir()
            yield {"what": what} | asyncio.run(make(folder))  # type: ignore[arg-type]


async def active(num_clients: int, num_rounds: int, folder: Path) -> Row:
    """CPU-seconds of each server for a round, and what the round leaves on disk."""
    job = light_job(num_rounds, num_clients)
    # On a busy machine rounds take longer: heartbeats would count as if they were work of the round.
    async with light_federation(folder, num_clients, job, heartbeat_seconds=60.0) as federation:
        await federation.until(num_rounds=WARM_ROUNDS)
        before, begin, stored = federation.spent(), time.perf_counter(), federation.database_bytes
        await federation.until(num_rounds=num_rounds)
        after, seconds = federation.spent(), time.perf_counter() - begin
        measured = num_rounds - WARM_ROUNDS
        row = {
            "clients": num_clients,
            "rounds": num_rounds,
            "cpu_seconds": {name: (after[name] - before[name]) / measured for name in after},
            "seconds": seconds / measured,
            "peak_bytes": federation.held("VmHWM"),
            "database_bytes": (federation.database_bytes - stored) / measured,
        }
        await federation.ended()
    return row | {"counts": federation.counts, "complaints": federation.complaints()}


async def idle(num_sessions: int, folder: Path) -> Row:
    """What sessions cost that only send heartbeats."""
    async with light_federation(folder, num_sessions) as federation:
        empty = federation.at_start["coordinator"]
        await federation.until(num_sessions=num_sessions)
        await asyncio.sleep(5.0)  # what their opening left behind
        heard = await asyncio.to_thread(_heartbeats, federation.http)
        before, begin = federation.spent()["coordinator"], time.perf_counter()
        await asyncio.sleep(IDLE_SECONDS)
        used, seconds = federation.spent()["coordinator"] - before, time.perf_counter() - begin
        heard = await asyncio.to_thread(_heartbeats, federation.http) - heard
        held = federation.held()["coordinator"]
        return {
            "sessions": num_sessions,
            "core_share": used / seconds,
            "heartbeats_a_second": heard / seconds,
            "bytes_a_session": (held - empty) / num_sessions,
            "complaints": federation.complaints(),
        }


def _heartbeats(http: str) -> float:
    """That the coordinator has received so far."""
    with urllib.request.urlopen(f"http://{http}/metrics") as answer:
        text = answer.read().decode()
    return float(text.partition("\nfedel_heartbeats_total ")[2].split()[0])


async def registered(num_agents: int, folder: Path) -> Row:
    """What agents cost that are only known, and how long a list of them takes."""
    store = SqlStore(f"sqlite:///{folder / DATABASE}")
    begin = time.perf_counter()
    store.put_agents([_agent(number) for number in range(num_agents)])
    written = time.perf_counter() - begin
    store.close()
    async with light_federation(folder, 0) as federation:
        listing = await asyncio.to_thread(_list_agents, federation.http)
        command = await asyncio.to_thread(timed_command, "fleet", "--coordinator", federation.address)
        return {
            "agents": num_agents,
            "written_seconds": written,
            "start_bytes": federation.at_start["coordinator"],
            "bytes": federation.held()["coordinator"],
            "api_seconds": listing,
            "fleet": command,
        }


def _agent(number: int) -> AgentRow:
    """Every tenth has an error with a long trace."""
    failed = number % 10 == 0
    return AgentRow(
        name=f"jetson-{number:05}",
        device_type="jetson-orin-nano",
        memory_bytes=8 * 10**9,
        agent_version="0.1.0",
        protocol=PROTOCOL,
        labels_json='{"gpu": "orin", "site": "roof"}',
        last_seen=time.time(),
        up_rate=1e6,
        down_rate=1e7,
        error_at=time.time() if failed else 0.0,
        error_message="RuntimeError: " + "x" * 200 if failed else "",
        error_trace="x" * 8000 if failed else "",
    )


def _list_agents(http: str) -> float:
    """Seconds for all pages of ``/api/agents``."""
    begin = time.perf_counter()
    after: str | None = ""
    while after is not None:
        with urllib.request.urlopen(f"http://{http}/api/agents?after={after}") as answer:
            after = json.loads(answer.read())["next"]
    return time.perf_counter() - begin


def timed_command(*words: str) -> dict[str, float]:
    """Seconds and CPU-seconds of a ``fedel`` command: of the faster of two calls."""
    found = []
    for _ in range(2):
        begin, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, "-m", "fedel.cli.main", *words], check=True, capture_output=True)
        after = os.times()
        cpu = sum(after[2:4]) - sum(before[2:4])
        found.append({"cpu_seconds": cpu, "seconds": time.perf_counter() - begin})
    return min(found, key=lambda each: each["cpu_seconds"])


def _active(rows: Rows) -> list[dict[str, Any]]:
    return sorted((dict(row) for row in rows if "clients" in row), key=lambda row: row["clients"])


def _points(rows: Rows, server: str) -> list[tuple[float, float]]:
    return [(row["clients"], row["cpu_seconds"][server]) for row in _active(rows)]


def show(rows: Rows) -> list[str]:
    cells = [
        [
            row["clients"],
            f"{row['cpu_seconds']['coordinator']:.3f}",
            f"{1000 * row['cpu_seconds']['coordinator'] / row['clients']:.2f}",
            f"{row['cpu_seconds']['aggregator']:.3f}",
            f"{row['seconds']:.2f}",
            f"{row['peak_bytes']['coordinator'] / 1e6:.0f}",
            f"{row['database_bytes'] / row['clients']:.0f}",
            f"{row['counts'].get('lost', 0)} lost, {len(row['complaints'])} warnings",
        ]
        for row in _active(rows)
    ]
    heads = ["clients", "coordinator CPU s", "of it ms per client", "aggregator CPU s", "seconds"]
    heads += ["coordinator peak MB", "database bytes per client", "trouble"]
    lines = ["Per round, with clients that train nothing and send a model of 20 kB:", "", *table(heads, cells)]
    lines += ["", f"Slope of the coordinator's CPU seconds over clients: {told(_points(rows, 'coordinator'))}."]
    for row in rows:
        if row["what"] == "idle sessions":
            lines += [
                "",
                f"{row['sessions']} idle sessions, {row['heartbeats_a_second']:.0f} heartbeats a second: they"
                f" take {row['core_share']:.0%} of a core, and {row['bytes_a_session'] / 1e3:.0f} kB each.",
            ]
        if row["what"] == "registered agents":
            lines += [
                "",
                f"{row['agents']} agents that are known: the coordinator has {row['start_bytes'] / 1e6:.0f} MB;"
                f" `/api/agents` lists all in {row['api_seconds']:.2f} s, `fedel fleet` in"
                f" {row['fleet']['cpu_seconds']:.1f} CPU seconds.",
            ]
    return lines


def pictures(rows: Rows) -> dict[str, str]:
    if len(_active(rows)) < 2:
        return {}
    lines = {server: _points(rows, server) for server in ("coordinator", "aggregator")}
    return {"clients": log_log(lines, "clients", "CPU seconds per round")}


def goals(rows: Rows) -> list[Goal]:
    found = []
    for row in rows:
        if row.get("clients") == 1000:
            lost = row["counts"].get("lost", 0) + len(row["complaints"])
            asked = "1,000 light clients"
            found.append(Goal(asked, f"{NUM_ROUNDS} rounds, no error", f"{lost} errors", lost == 0))
        if row["what"] == "idle sessions":
            share = row["core_share"]
            asked = f"{row['sessions']} idle sessions"
            found.append(Goal(asked, "at most 20 % of a core", f"{share:.0%}", share <= MAX_IDLE_SHARE))
    grows = slope(_points(rows, "coordinator"))
    if grows is not None:
        found.append(Goal("coordinator's CPU over clients", "slope at most 1.1", f"{grows:.2f}", grows <= 1.1))
    return found


SECTION = Section(
    "coordinator", "The coordinator with many clients", 50, measure, show, pictures, goals, quick=True
)
