"""A coordinator, an aggregator and light clients, each in processes of their own, and what they cost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedel.bench.light_clients import Fleet
from fedel.bench.made_up import made_up_model, made_up_spec
from fedel.chaos.processes import START_SECONDS, Process, until
from fedel.desk import child
from fedel.desk.submit import create
from fedel.errors import ServiceError
from fedel.job import RunConfig

RUN, DATABASE = "light", "coordinator.db"
CLIENTS_OF_PROCESS = 500
ROUND_SECONDS = 600.0
"""A round that takes longer has failed."""
NOT_YET = "try again in a moment"
"""A client that trains nothing may be faster than the aggregator hears of the round; it is no error."""
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Of a process with all its threads, so far."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS


def memory_bytes(pid: int, kind: str = "VmRSS") -> int:
    """What a process holds now; with ``VmHWM`` the most that it held."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition(f"{kind}:")[2].split()[0])


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@dataclass
class LightFederation:
    """A running one."""

    folder: Path
    address: str
    http: str
    pids: dict[str, int]
    """Of the servers, by name."""
    at_start: dict[str, int] = field(default_factory=dict)
    """Bytes that they held before the first client came."""
    cpu_at_start: dict[str, float] = field(default_factory=dict)
    """CPU-seconds until then."""
    closed: int = 0
    """Rounds so far."""
    num_sessions: int = 0
    errors: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    reading: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def database_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob(f"{DATABASE}*"))

    def spent(self) -> dict[str, float]:
        """CPU-seconds of each server so far."""
        return {name: cpu_seconds(pid) for name, pid in self.pids.items()}

    def held(self, kind: str = "VmRSS") -> dict[str, int]:
        return {name: memory_bytes(pid, kind) for name, pid in self.pids.items()}

    async def until(self, num_rounds: int = 0, num_sessions: int = 0) -> None:
        """Wait until so many rounds are closed and sessions open."""

        def there() -> bool:
            return self.closed >= num_rounds and self.num_sessions >= num_sessions

        async with self.changed:
            while not there():
                if self.errors:
                    raise ServiceError(f"a light client failed: {self.errors[0]}")
                before = self.closed, self.num_sessions
                try:
                    await asyncio.wait_for(self.changed.wait(), ROUND_SECONDS)
                except asyncio.TimeoutError:
                    raise ServiceError(
                        f"nothing happened for {ROUND_SECONDS:g} s after {before[0]} rounds and {before[1]}"
                        " sessions: see the logs of the servers"
                    ) from None

    async def take(self, lines: asyncio.StreamReader) -> None:
        """What a process of clients writes."""
        async for line in lines:
            told: dict[str, Any] = json.loads(line)
            async with self.changed:
                self.closed = max(self.closed, told.get("closed", -1) + 1)
                self.num_sessions += told.get("sessions", 0)
                self.errors += [told["error"]] if "error" in told else []
                for name, count in told.get("counts", {}).items():
                    self.counts[name] = self.counts.get(name, 0) + count
                self.changed.notify_all()

    async def ended(self) -> None:
        """Wait until every client has heard that the run is over, and has told what became of its tasks."""
        await asyncio.wait_for(asyncio.gather(*self.reading), ROUND_SECONDS)

    def complaints(self) -> list[str]:
        """Warnings and errors of the clients, and in the servers' logs."""
        found = list(self.errors)
        for name in self.pids:
            for line in (self.folder / f"{name}.log").read_text(encoding="utf-8").splitlines():
                told = json.loads(line) if line.startswith("{") else {"level": "ERROR", "message": line}
                if told["level"] in ("WARNING", "ERROR", "CRITICAL") and NOT_YET not in told["message"]:
                    found.append(f"{name}: {told['message']}")
        return found


@asynccontextmanager
async def light_federation(
    folder: Path,
    num_clients: int,
    job: RunConfig | None = None,
    fleet: Fleet | None = None,
    **settings: Any,
) -> AsyncIterator[LightFederation]:
    """With a ``job`` the clients join its run; without one their sessions stay idle."""
    async with AsyncExitStack() as stack:
        aggregator = _server(folder, "aggregator", data_dir=str(folder / "models"))
        stack.callback(aggregator.kill)
        aggregator.start()
        bulk = await aggregator.address()
        coordinator = _server(
            folder,
            "coordinator",
            aggregators=[bulk],
            database_url=f"sqlite:///{folder / DATABASE}",
            http="127.0.0.1:0",
            http_port_file=str(folder / "http"),
            max_messages_per_second=1000.0,  # rounds without training follow faster than a device may speak
            **settings,
        )
        stack.callback(coordinator.kill)
        coordinator.start()
        address = await coordinator.address()
        pids = {"coordinator": coordinator.pid, "aggregator": aggregator.pid}
        await until((folder / "http").exists, "the page to be served", START_SECONDS)
        federation = LightFederation(folder, address, (folder / "http").read_text(encoding="utf-8"), pids)
        federation.at_start, federation.cpu_at_start = federation.held(), federation.spent()
        fleet = fleet or Fleet(address, 0, num_clients)
        if job is not None:
            spec = made_up_spec(fleet.num_tensors, fleet.model_bytes)
            await create(address, RUN, job, spec, made_up_model(spec))
        for first in range(0, num_clients, CLIENTS_OF_PROCESS):
            number = min(CLIENTS_OF_PROCESS, num_clients - first)
            part = Fleet(**(fleet.__dict__ | {"address": address, "first": first, "num_clients": number}))
            await stack.enter_async_context(_clients(part, federation))
        yield federation


def _server(folder: Path, name: str, **settings: Any) -> Process:
    listening = {"listen": "127.0.0.1:0", "port_file": str(folder / f"{name}.port")}
    return Process(f"fedel_{name}", name, folder, {**listening, **settings})


@asynccontextmanager
async def _clients(fleet: Fleet, federation: LightFederation) -> AsyncIterator[None]:
    words = child.command("fedel.bench.light_clients", fleet.to_json())
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), process.stdout
    )
    reading = asyncio.create_task(federation.take(lines))
    federation.reading.append(reading)
    try:
        yield
    finally:
        process.kill()
        process.wait()
        await reading


def light_job(num_rounds: int, num_clients: int, **rounds: Any) -> RunConfig:
    table = {
        "strategy": {"name": "fedel"},
        "workload": {"model": "made-up", "data": "made-up"},
        "rounds": {
            "num_rounds": num_rounds,
            "min_clients": num_clients,
            "evaluate_every": 0,
            "deadline_floor_seconds": ROUND_SECONDS,
            **rounds,
        },
        "budget": {"pace": "plan"},  # with the clock, a round would not wait for all on a busy machine
        "work": {"num_steps": 4},
    }
    return RunConfig.parse(table)
