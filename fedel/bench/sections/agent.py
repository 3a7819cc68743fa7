"""What an agent costs its device: until it is there, while it waits, and from a task to its first step."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fedel_edge

import fedel
from fedel.bench import plain_training
from fedel.bench.first_step import FILE
from fedel.bench.light_federation import LightFederation, cpu_seconds, light_federation, memory_bytes
from fedel.bench.page import table
from fedel.bench.section import Options, Row, Rows, Say, Section
from fedel.chaos.processes import Process, until
from fedel.desk.submit import create, follow
from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.training.factory import initial_model
from fedel.v1 import coordinator_pb2 as pb

NUM_ROUNDS = 4
WAIT_SECONDS = 120.0
IN_SESSION = "in session with the coordinator"


def measure(options: Options, say: Say) -> Iterator[Row]:
    say("agent: start, idle, from a task to the first step")
    folder = options.folder / "agent"
    folder.mkdir()
    idle_seconds = 10.0 if options.quick else 60.0
    yield {"what": "agent"} | asyncio.run(agent(folder, idle_seconds))
    yield {"what": "installed"} | installed()


async def agent(folder: Path, idle_seconds: float) -> Row:
    steps = folder / "steps"
    async with light_federation(folder, 0) as federation:
        settings: dict[str, Any] = {
            "coordinator": federation.address,
            "name": "one",
            "state_dir": str(folder / "state"),
        }
        settings |= {"threads": 1, "code": {"allow": ["fedel.bench"]}}
        process = Process("fedel_edge", "agent", folder, settings)
        begin = time.perf_counter()
        with patch.dict(os.environ, {FILE: str(steps)}):
            process.start()
        try:
            await until(
                lambda: IN_SESSION in process.log.read_text(encoding="utf-8"), "its session", WAIT_SECONDS
            )
            row: Row = {
                "start_seconds": time.perf_counter() - begin,
                "start_cpu_seconds": cpu_seconds(process.pid),
            }
            before = cpu_seconds(process.pid)
            await asyncio.sleep(idle_seconds)
            row["idle_cpu_seconds_a_minute"] = 60 / idle_seconds * (cpu_seconds(process.pid) - before)
            row["idle_bytes"] = memory_bytes(process.pid)
            records = await _train(federation)
            row["training_bytes"] = memory_bytes(process.pid)
        finally:
            process.kill()
    began = [float(line) for line in steps.read_text(encoding="ascii").split()]
    opened = [record.opened_at for record in records]
    row["first_step_seconds"] = [start - at for start, at in zip(began, opened, strict=True)]
    return row


async def _train(federation: LightFederation) -> list[RoundRecord]:
    """A run of one client, with torch."""
    module = plain_training.__name__
    job = RunConfig.parse(
        {
            "strategy": {"name": "fedavg"},
            "workload": {"model": f"{module}:model", "data": f"{module}:data"},
            "rounds": {"num_rounds": NUM_ROUNDS, "evaluate_every": 0},
            "work": {"num_steps": 5},
            "trainer": "fedel.bench.first_step:make_trainer",
        }
    )
    spec, model = await asyncio.to_thread(initial_model, job)
    await create(federation.address, "one", job, spec, model)
    records: list[RoundRecord] = []

    def show(status: pb.RunStatus) -> None:
        records.extend(RoundRecord.from_json(text) for text in status.rounds_json)

    await asyncio.wait_for(follow(federation.address, "one", show), WAIT_SECONDS)
    return records


def installed() -> Row:
    """Bytes on disk of FedEL and of what an agent needs besides, torch aside."""
    wanted, sizes = ["fedel"], dict[str, int]()
    while wanted:
        name = wanted.pop()
        if name in sizes or name == "torch":
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        paths = [Path(str(file.locate())) for file in found.files or ()]
        if name == "fedel":  # as a wheel would have it, also where it is installed for changing it
            folders = (Path(package.__file__ or "").parent for package in (fedel, fedel_edge))
            paths = [
                path for folder in folders for path in folder.rglob("*") if path.parent.name != "__pycache__"
            ]
        sizes[name] = sum(path.stat().st_size for path in paths if path.is_file())
        wanted += [each for text in found.requires or () if (each := _needed(text, name == "fedel"))]
    return {"bytes": sizes}


def _needed(requirement: str, ours: bool) -> str:
    """The name of a package that is always needed, or by our agent; else an empty text."""
    name = re.match(r"[\w.-]+", requirement)
    extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
    if name is None or (extra and not (ours and extra[1] == "edge-own-torch")):
        return ""
    return name[0].lower().replace("_", "-")


def show(rows: Rows) -> list[str]:
    lines = []
    for row in rows:
        if row["what"] == "agent":
            first, *later = row["first_step_seconds"]
            cells = [
                ["start until the session, s", f"{row['start_seconds']:.1f}"],
                ["of it CPU s", f"{row['start_cpu_seconds']:.1f}"],
                ["idle, CPU s per minute", f"{row['idle_cpu_seconds_a_minute']:.2f}"],
                ["idle, MB", f"{row['idle_bytes'] / 1e6:.0f}"],
                ["after training with torch, MB", f"{row['training_bytes'] / 1e6:.0f}"],
                ["from the plan to the first step, first round, s", f"{first:.2f}"],
                ["later rounds, s", f"{min(later):.2f} to {max(later):.2f}"],
            ]
            lines += table(["an agent", ""], cells)
        if row["what"] == "installed":
            sizes = sorted(row["bytes"].items(), key=lambda item: -item[1])
            cells = [[name, f"{size / 1e6:.1f}"] for name, size in sizes if size > 100_000]
            total = sum(row["bytes"].values())
            lines += ["", f"On disk, torch aside: {total / 1e6:.0f} MB in {len(sizes)} packages."]
            lines += ["", *table(["package", "MB"], cells)]
    return lines


SECTION = Section("agent", "The agent on its device", 80, measure, show, quick=True)
