"""FedEL's own servers under load: a real coordinator and a real aggregator, each in its own process.

Counted as server: both. Clients are those of ``clients.py`` in a few processes, and one real agent in a process
of its own, whose memory is that of a client.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedel import config
from fedel.bench import trainer
from fedel.bench.follow import last_line
from fedel.bench.load import Load, Outcome
from fedel.bench.proc import Watch
from fedel.bench.workloads import values
from fedel.desk import child
from fedel.desk.submit import create, follow
from fedel.errors import ServiceError
from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.security.authority import Authority
from fedel.security.identity import AGENT, OPERATOR, SERVICE, Identity
from fedel.security.tls import Tls
from fedel.v1 import coordinator_pb2 as pb

RUN = "bench"
START_SECONDS = 60.0
NUM_LOADERS = 2
"""Processes that act as clients."""


def measure(
    load: Load, folder: Path, *, method: str = "fedavg", mtls: bool = False, aggregators: int = 1
) -> Outcome:
    """Run the rounds of a load; ``method`` decides what clients send and get."""
    with ExitStack() as stack:
        certs = folder / "certs"
        if mtls:
            issue(certs, load.num_clients)
        servers = Servers(folder, stack, certs if mtls else None, aggregators)
        operator = Tls(dir=str(certs / "operator")) if mtls else Tls()
        return asyncio.run(_rounds(load, servers, operator, method))


def issue(certs: Path, num_clients: int) -> None:
    """An authority and certificates for everybody."""
    authority = Authority.create(certs / "ca")
    for name in ("aggregator", "coordinator"):
        authority.issue(certs / name, Identity(SERVICE, name), ["localhost", "127.0.0.1"])
    authority.issue(certs / "operator", Identity(OPERATOR, "operator"))
    for index in range(num_clients):
        authority.issue(certs / f"client-{index}", Identity(AGENT, f"client-{index}"))


class Servers:
    """The processes of a federation; they end with ``stack``."""

    def __init__(self, folder: Path, stack: ExitStack, certs: Path | None, aggregators: int = 1) -> None:
        self.folder, self._stack, self._certs = folder, stack, certs
        self._pids: tuple[int, ...] = ()
        names = ["aggregator", *(f"aggregator-{number}" for number in range(2, aggregators + 1))]
        places = [self._serve("aggregator", name, {"data_dir": str(folder / name)}) for name in names]
        self.address = self._serve(
            "coordinator",
            "coordinator",
            {
                "aggregators": places,
                "database_url": f"sqlite:///{folder / 'coordinator.db'}",
                "runs_dir": str(folder / "runs"),
            },
        )

    def _serve(self, kind: str, name: str, settings: Mapping[str, Any]) -> str:
        port_file = self.folder / f"{name}.address"
        shared: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "port_file": str(port_file),
            "log_level": "WARNING",
        }
        self._pids = (*self._pids, self.start(f"fedel_{kind}", name, {**shared, **settings}))
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise ServiceError(f"{name} did not listen within {START_SECONDS:g} s; see {self.folder}")
            time.sleep(0.05)
        return port_file.read_text(encoding="utf-8")

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the aggregators, and last of the coordinator."""
        return self._pids

    def start(self, module: str, name: str, settings: Mapping[str, Any]) -> int:
        """A process with a configuration file."""
        if self._certs is not None:
            settings = {**settings, "tls": {"dir": str(self._certs / name)}}
        file = self.folder / f"{name}.toml"
        file.write_text(config.write(settings), encoding="utf-8")
        return self.run(name, module, "--config", str(file))

    def run(self, name: str, *words: str) -> int:
        return self._stack.enter_context(process(self.folder / f"{name}.log", self.folder, *words)).pid

    def start_clients(self, num_clients: int) -> int:
        """All of them; returns the process of the real agent."""
        certs = str(self._certs or "")
        real = self.start(
            "fedel_edge",
            "client-0",
            {
                "coordinator": self.address,
                "name": "client-0",
                "state_dir": str(self.folder / "client-0"),
                "evaluate": False,
                "data": {"index": 0, "of": num_clients},
                "code": {"allow": ["fedel.bench"]},
                "log_level": "WARNING",
            },
        )
        share = -(-(num_clients - 1) // NUM_LOADERS)
        for first in range(1, num_clients, max(1, share)):
            numbers = map(str, (first, min(share, num_clients - first), num_clients))
            words = (self.address, str(self.folder), *numbers, *([certs] if certs else []))
            self.run(f"clients-{first}", "fedel.bench.clients", *words)
        return real


@contextmanager
def process(log: Path, folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A module of ours as a process; it is killed at the end."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            child.command(*words, at_the_end=signal.SIGKILL),
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def job(load: Load, method: str) -> RunConfig:
    table = {
        "strategy": {"name": method},
        "workload": {"model": "vgg16", "data": "none", "model_options": {"size": load.workload.name}},
        "rounds": {
            "num_rounds": load.num_rounds,
            "min_clients": load.num_clients,
            "evaluate_every": 0,
            "deadline_floor_seconds": load.seconds,
        },
        "budget": {"pace": "plan"},
        "work": {"num_steps": 4, "batch_size": 8},
        "trainer": trainer.NAME,
    }
    return RunConfig.parse(table)


async def _rounds(load: Load, servers: Servers, tls: Tls, method: str) -> Outcome:
    """Start the clients and note the counters at the end of every round."""
    await create(servers.address, RUN, job(load, method), load.workload.spec, values(load.workload, 0), tls)
    records: list[RoundRecord] = []
    watch = Watch(servers.pids, (servers.start_clients(load.num_clients),))

    def show(status: pb.RunStatus) -> None:
        for text in status.rounds_json:
            watch.mark()
            records.append(RoundRecord.from_json(text))

    with watch:
        try:
            last = await asyncio.wait_for(follow(servers.address, RUN, show, tls), load.seconds)
        except asyncio.TimeoutError:
            said = last_line(servers.folder)
            raise ServiceError(
                f"ended after {len(records)} of {load.num_rounds} rounds: more than {load.seconds:g} s; {said}"
            ) from None
    if last.phase != pb.RUN_PHASE_FINISHED:
        raise ServiceError(f"the run did not finish: {last.message}")
    if any(record.num_updates != load.num_clients for record in records):
        raise ServiceError(f"not every update counted: {[r.num_updates for r in records]}")
    later = records[1:] or records
    return Outcome(
        watch,
        sum(r.bytes_up for r in later) / len(later),
        sum(r.bytes_down for r in later) / len(later),
        sum(r.phases.get("commit", 0.0) for r in later) / len(later),
    )
