"""How costs grow with the size of the model, the number of its tensors and the number of rounds so far."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedel.bench import machine
from fedel.bench.light_clients import Fleet
from fedel.bench.light_federation import DATABASE, RUN, folder_bytes, light_federation, light_job
from fedel.bench.page import table
from fedel.bench.section import Goal, Options, Row, Rows, Say, Section
from fedel.bench.sections.coordinator import timed_command
from fedel.bench.slopes import Points, log_log, told
from fedel.bench.stored_run import store_run
from fedel.errors import ServiceError

MODEL_BYTES = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
NUM_TENSORS = (20, 200, 2000)
STORED_ROUNDS = (100, 1000, 10_000)
ROUNDS = 10_000
ROUNDS_SECONDS = 600.0
"""The run of many rounds is stopped after this time."""
MODELS_HELD = 12
"""Models in memory at the same time, servers and clients together; the largest model is chosen by it."""
NUM_CLIENTS, NUM_ROUNDS = 2, 3


def measure(options: Options, say: Say) -> Iterator[Row]:
    for num_bytes in MODEL_BYTES[:2] if options.quick else MODEL_BYTES:
        what = f"model of {num_bytes // 1_000_000} MB"
        if what not in options.done:
            say(f"growth: {what}")
            yield {"what": what, "model_bytes": num_bytes} | _cost(options.folder, what, 20, num_bytes)
    for number in NUM_TENSORS[:2] if options.quick else NUM_TENSORS:
        what = f"{number} tensors"
        if what not in options.done:
            say(f"growth: {what}")
            yield {"what": what, "tensors": number} | _cost(options.folder, what, number, 2_000_000, 10, 6)
    for number in STORED_ROUNDS[:2] if options.quick else STORED_ROUNDS:
        what = f"{number} rounds stored"
        if what not in options.done:
            say(f"growth: {what}")
            folder = options.folder / what.replace(" ", "-")
            folder.mkdir()
            yield {"what": what} | asyncio.run(stored_rounds(folder, number))
    if not options.quick:
        folder = options.folder / "rounds"
        folder.mkdir()
        say(f"growth: {ROUNDS} rounds, or {ROUNDS_SECONDS:g} s")
        yield {"what": "rounds"} | asyncio.run(many_rounds(folder, ROUNDS, ROUNDS_SECONDS, say))


def _cost(
    folder: Path, what: str, tensors: int, num_bytes: int, clients: int = NUM_CLIENTS, rounds: int = NUM_ROUNDS
) -> Row:
    """Of a round in which every client fetches and sends the whole model."""
    if MODELS_HELD * num_bytes > machine.available_bytes():
        return {"error": f"{MODELS_HELD} such models do not fit into the memory that is free"}
    place = folder / what.replace(" ", "-")
    place.mkdir()
    fleet = Fleet("", 0, clients, tensors, num_bytes, downloads=True)
    try:
        return asyncio.run(_rounds(place, fleet, rounds))
    except ServiceError as error:
        return {"error": str(error)}


async def _rounds(folder: Path, fleet: Fleet, num_rounds: int) -> Row:
    job = light_job(num_rounds, fleet.num_clients)
    async with light_federation(folder, fleet.num_clients, job, fleet) as federation:
        await federation.until(num_rounds=1)
        before, begin = federation.spent(), time.perf_counter()
        await federation.until(num_rounds=num_rounds)
        after, seconds = federation.spent(), time.perf_counter() - begin
        return {
            "clients": fleet.num_clients,
            "cpu_seconds": {name: (after[name] - before[name]) / (num_rounds - 1) for name in after},
            "seconds": seconds / (num_rounds - 1),
            "peak_bytes": federation.held("VmHWM"),
        }


async def stored_rounds(folder: Path, num_rounds: int) -> Row:
    """A run with so many closed rounds of ten clients: what it takes to start with it and to look at it."""
    await asyncio.to_thread(store_run, folder / DATABASE, RUN, num_rounds)
    async with light_federation(folder, 0) as federation:
        coordinator, newest = ("--coordinator", federation.address), num_rounds - 50
        first = await asyncio.to_thread(_get, federation.http, f"/api/runs/{RUN}/rounds?since={newest}", 1)
        return {
            "stored_rounds": num_rounds,
            "start_cpu_seconds": federation.cpu_at_start["coordinator"],
            "start_bytes": federation.at_start["coordinator"],
            "first_look_seconds": first,
            "bytes": federation.held()["coordinator"],
            "database_bytes": federation.database_bytes,
            "api_run_seconds": await asyncio.to_thread(_get, federation.http, f"/api/runs/{RUN}"),
            "api_newest_rounds_seconds": await asyncio.to_thread(
                _get, federation.http, f"/api/runs/{RUN}/rounds?since={newest}"
            ),
            "status": await asyncio.to_thread(timed_command, "status", RUN, *coordinator),
            "runs": await asyncio.to_thread(timed_command, "runs", *coordinator),
        }


async def many_rounds(folder: Path, num_rounds: int, seconds: float, say: Say) -> Row:
    """A run of two clients: what it holds and leaves on disk, and how long people wait, as rounds go by."""
    begin, marks = time.perf_counter(), list[dict[str, Any]]()
    async with light_federation(
        folder, 2, light_job(num_rounds, 2), runs_dir=str(folder / "runs")
    ) as federation:
        wanted = 50
        while wanted < num_rounds and time.perf_counter() - begin < seconds:
            await federation.until(num_rounds=wanted)
            marks.append(await asyncio.to_thread(_mark, federation, folder))
            say(f"growth: {marks[-1]['rounds']} rounds")
            # Marks at even distances on a logarithmic axis, and not too far from each other.
            wanted = federation.closed + max(50, federation.closed // 2)
    return {"marks": marks, "complaints": federation.complaints()}


def _mark(federation: Any, folder: Path) -> dict[str, Any]:
    closed, coordinator = federation.closed, ("--coordinator", federation.address)
    newest = max(0, closed - 50)
    return {
        "rounds": closed,
        "cpu_seconds": federation.spent(),
        "bytes": federation.held(),
        "database_bytes": federation.database_bytes,
        "models_bytes": folder_bytes(folder / "models"),
        "run_bytes": folder_bytes(folder / "runs"),
        "api_run_seconds": _get(federation.http, f"/api/runs/{RUN}"),
        "api_newest_rounds_seconds": _get(federation.http, f"/api/runs/{RUN}/rounds?since={newest}"),
        "status": timed_command("status", RUN, *coordinator),
        "runs": timed_command("runs", *coordinator),
    }


def _get(http: str, path: str, times: int = 2) -> float:
    """Seconds of the fastest request."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        with urllib.request.urlopen(f"http://{http}{path}") as answer:
            answer.read()
        found.append(time.perf_counter() - begin)
    return min(found)


def _with(rows: Rows, key: str) -> list[dict[str, Any]]:
    return sorted((dict(row) for row in rows if key in row and "error" not in row), key=lambda row: row[key])


def _cpu(rows: Rows, key: str, server: str) -> Points:
    return [(row[key], row["cpu_seconds"][server]) for row in _with(rows, key)]


def _marks(rows: Rows) -> list[dict[str, Any]]:
    return next((row["marks"] for row in rows if row["what"] == "rounds"), [])


def show(rows: Rows) -> list[str]:
    lines = []
    for key, head, unit in (("model_bytes", "model, MB", 1e6), ("tensors", "tensors", 1)):
        cells = [
            [
                f"{row[key] / unit:g}",
                row["clients"],
                f"{row['cpu_seconds']['aggregator']:.3f}",
                f"{row['cpu_seconds']['coordinator']:.3f}",
                f"{row['seconds']:.2f}",
                f"{row['peak_bytes']['aggregator'] / 1e6:.0f}",
                f"{row['peak_bytes']['coordinator'] / 1e6:.0f}",
            ]
            for row in _with(rows, key)
        ]
        heads = [head, "clients", "aggregator CPU s", "coordinator CPU s", "seconds", "aggregator peak MB"]
        lines += ["", *table([*heads, "coordinator peak MB"], cells)]
        slopes = ", ".join(
            f"{server} {told(_cpu(rows, key, server))}" for server in ("aggregator", "coordinator")
        )
        lines += ["", f"Slopes of CPU seconds per round: {slopes}."]
    lines += ["", *(f"{row['what']}: {row['error']}" for row in rows if "error" in row)]
    return [*lines, *_show_stored(rows), "", *_show_rounds(rows)]


def _show_stored(rows: Rows) -> list[str]:
    cells = [
        [
            row["stored_rounds"],
            f"{row['start_cpu_seconds']:.1f}",
            f"{row['start_bytes'] / 1e6:.0f}",
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['first_look_seconds']:.2f}",
            f"{1000 * row['api_newest_rounds_seconds']:.0f}",
            f"{1000 * row['api_run_seconds']:.0f}",
            f"{row['status']['cpu_seconds']:.2f}",
            f"{row['runs']['cpu_seconds']:.2f}",
        ]
        for row in _with(rows, "stored_rounds")
    ]
    if not cells:
        return []
    heads = ["closed rounds", "start CPU s", "MB", "MB once the page was open", "its first look s"]
    heads += ["newest rounds ms", "run ms", "`fedel status` CPU s", "`fedel runs` CPU s"]
    return [
        "",
        "A run of ten clients, its rounds stored; the coordinator is started with it:",
        "",
        *table(heads, cells),
    ]


def _show_rounds(rows: Rows) -> list[str]:
    marks = _marks(rows)
    if not marks:
        return []
    cells = [
        [
            mark["rounds"],
            f"{mark['bytes']['coordinator'] / 1e6:.1f}",
            f"{mark['bytes']['aggregator'] / 1e6:.1f}",
            f"{mark['database_bytes'] / mark['rounds']:.0f}",
            f"{mark['run_bytes'] / mark['rounds']:.0f}",
            f"{mark['models_bytes'] / 1e6:.2f}",
            f"{1000 * mark['api_run_seconds']:.0f}",
            f"{1000 * mark['api_newest_rounds_seconds']:.0f}",
            f"{mark['status']['cpu_seconds']:.2f}",
            f"{mark['runs']['cpu_seconds']:.2f}",
        ]
        for mark in marks
    ]
    heads = [
        "rounds",
        "coordinator MB",
        "aggregator MB",
        "database bytes per round",
        "run folder bytes per round",
    ]
    heads += [
        "models MB",
        "page's run ms",
        "page's newest rounds ms",
        "`fedel status` CPU s",
        "`fedel runs` CPU s",
    ]
    return ["One run of two clients, as its rounds go by:", "", *table(heads, cells)]


def pictures(rows: Rows) -> dict[str, str]:
    made = {}
    for key, label in (("model_bytes", "bytes of the model"), ("tensors", "tensors")):
        lines = {server: _cpu(rows, key, server) for server in ("aggregator", "coordinator")}
        if len(lines["aggregator"]) > 1:
            made[key.replace("_", "-")] = log_log(lines, label, "CPU seconds per round")
    marks = _marks(rows)
    if len(marks) > 1:
        lines = {
            "coordinator's memory": [(mark["rounds"], mark["bytes"]["coordinator"]) for mark in marks],
            "aggregator's memory": [(mark["rounds"], mark["bytes"]["aggregator"]) for mark in marks],
            "database": [(mark["rounds"], mark["database_bytes"]) for mark in marks],
        }
        made["rounds"] = log_log(lines, "rounds", "bytes")
    return made


def goals(rows: Rows) -> list[Goal]:
    marks = _marks(rows)
    if len(marks) < 2:
        return []
    first, last = marks[0], marks[-1]
    grown = last["bytes"]["coordinator"] / first["bytes"]["coordinator"]
    waits = max(last[key]["cpu_seconds"] / first[key]["cpu_seconds"] for key in ("status", "runs"))
    asked = f"{last['rounds']} rounds of one run"
    return [
        Goal(
            asked, "coordinator's memory level", f"{grown:.2f} times that after {first['rounds']}", grown < 1.2
        ),
        Goal(asked, "`fedel status`, `fedel runs` as quick", f"{waits:.2f} times", waits < 1.3),
    ]


SECTION = Section(
    "growth", "How costs grow with model, tensors and rounds", 60, measure, show, pictures, goals, quick=False
)
