"""A large fleet on one machine: do the servers' memory and the time per round stay constant, without failures?

    python benchmarks/fleet.py
    python benchmarks/fleet.py --agents 50 --rounds 10 --json fleet.json

A real coordinator and a real aggregator, each in its own process, and real agents over gRPC on the loopback,
each with its own connections. The agents share a few processes and train with the fake trainer of the tests. So
the seconds are those of the system, not of training. Most are spent in the agents; real devices would share
them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fedel_edge.agent import Agent  # noqa: E402
from fedel_edge.config import AgentConfig  # noqa: E402
from fedel_services.runtime import wait_for_stop_signal  # noqa: E402
from grpc import aio  # noqa: E402

from fedel.job import RunConfig  # noqa: E402
from fedel.plugins import Allowed  # noqa: E402
from fedel.records import RoundRecord  # noqa: E402
from fedel.training.settings import DataPart  # noqa: E402
from fedel.types import Tensors  # noqa: E402
from fedel.wire.channel import OPTIONS  # noqa: E402
from tests.federation.processes import Process  # noqa: E402
from tests.federation.support import Watch, create_run, job_of, model_of, watching  # noqa: E402
from tests.federation.trainers import spec_of  # noqa: E402

RUN = "fleet"
HEARTBEAT_SECONDS = 20.0
LONGEST_ROUND_SECONDS = 600.0


class Apart(Agent):
    """An agent that does not share connections with the others of its process."""

    def _channel(self, address: str) -> aio.Channel:
        if address not in self._channels:
            options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            self._channels[address] = aio.insecure_channel(address, options=options)
        return self._channels[address]


async def play(address: str, first: int, num_agents: int, of: int, folder: Path) -> None:
    """Inside a loader process: runs some of the agents until it is stopped, then writes their results."""
    agents = [
        Apart(
            AgentConfig(
                address,
                f"client-{i}",
                folder / f"client-{i}",
                data=DataPart(i, of),
                evaluate=i == 0,
                code=Allowed(("tests",)),
            )
        )
        for i in range(first, first + num_agents)
    ]
    running = [asyncio.ensure_future(agent.run()) for agent in agents]
    await wait_for_stop_signal()
    for agent in agents:
        agent.stop()
    await asyncio.gather(*running)
    counts = sum((agent.counts for agent in agents), Counter[str]())
    (folder / f"loader-{first}.json").write_text(json.dumps(counts))


@contextmanager
def loaders(address: str, num_agents: int, num_loaders: int, folder: Path) -> Iterator[None]:
    """Start the processes that run all agents."""
    share = -(-num_agents // num_loaders)
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--play", address, str(first), str(min(share, num_agents - first)),
             str(num_agents), str(folder)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for first in range(0, num_agents, share)
    ]  # fmt: skip
    try:
        yield
    finally:
        for loader in started:
            loader.send_signal(signal.SIGTERM)
        for loader in started:
            loader.wait()


def rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@dataclass(frozen=True)
class Figures:
    num_agents: int
    num_rounds: int
    model_bytes: int
    seconds: list[float]
    """Latency of each round."""
    rss: dict[str, list[int]]
    """Resident bytes of each server after each round; a round whose end was missed has those of the next."""
    num_updates: list[int]
    counts: dict[str, int]
    """Outcomes of the agents' tasks: ``done``, ``failed``, ``given_up``."""
    complaints: int
    """Warnings and errors in the servers' logs."""
    up_share: float
    """Bytes sent per client and round, divided by the size of the model."""
    down_share: float
    """Bytes received per client and round after the first round, divided by the size of the model."""


async def measure(
    num_agents: int, num_rounds: int, num_loaders: int, scale: int, folder: Path
) -> tuple[Figures, Tensors]:
    """The numbers, and the final model."""
    aggregator = Process("fedel_aggregator", "aggregator", folder, _settings(folder, "aggregator"))
    aggregator.start()
    coordinator: Process | None = None
    try:
        bulk = await aggregator.address()
        settings = _settings(folder, "coordinator") | {
            "aggregators": [bulk],
            "database_url": f"sqlite:///{folder / 'coordinator.db'}",
            "heartbeat_seconds": HEARTBEAT_SECONDS,
        }
        coordinator = Process("fedel_coordinator", "coordinator", folder, settings)
        coordinator.start()
        address = await coordinator.address()
        await create_run(address, RUN, job(num_agents, num_rounds, scale))
        pids = {"coordinator": coordinator.pid, "aggregator": aggregator.pid}
        with loaders(address, num_agents, num_loaders, folder):
            records, rss = await _watch(address, num_rounds, pids)
        model = await model_of(address, RUN, folder)
    finally:
        for server in (coordinator, aggregator):
            if server is not None:
                server.kill()
    return _figures(num_agents, scale, records, rss, folder), model


def job(num_agents: int, num_rounds: int, scale: int) -> RunConfig:
    return job_of(
        {"name": "fedel"},
        num_agents,
        num_rounds,
        options={"scale": scale},
        deadline_floor_seconds=LONGEST_ROUND_SECONDS,
    )


def _settings(folder: Path, name: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"listen": "127.0.0.1:0", "port_file": str(folder / f"{name}.address")}
    return settings | ({"data_dir": str(folder / "models")} if name == "aggregator" else {})


async def _watch(
    address: str, num_rounds: int, pids: dict[str, int]
) -> tuple[list[RoundRecord], dict[str, list[int]]]:
    rss: dict[str, list[int]] = {name: [] for name in pids}
    async with watching(address, RUN) as watch:
        while len(rss["aggregator"]) < num_rounds:
            closed = len(rss["aggregator"]) + 1
            await watch.until(partial(_has_closed, watch, closed), f"round {closed}", LONGEST_ROUND_SECONDS)
            for name, pid in pids.items():
                rss[name].append(rss_bytes(pid))
        await watch.finished()
        return watch.records, rss


def _has_closed(watch: Watch, num_rounds: int) -> bool:
    return len(watch.records) >= num_rounds


def _figures(
    num_agents: int, scale: int, records: list[RoundRecord], rss: dict[str, list[int]], folder: Path
) -> Figures:
    counts: Counter[str] = Counter()
    for path in folder.glob("loader-*.json"):
        counts.update(json.loads(path.read_text()))
    logs = "".join((folder / f"{name}.log").read_text() for name in rss)
    lines = [json.loads(line) for line in logs.splitlines() if line.startswith("{")]
    model_bytes = sum(4 * t.size for t in spec_of(scale).tensors)
    later = records[1:]
    return Figures(
        num_agents=num_agents,
        num_rounds=len(records),
        model_bytes=model_bytes,
        seconds=[record.latency_seconds for record in records],
        rss=rss,
        num_updates=[record.num_updates for record in records],
        counts=dict(counts),
        complaints=sum(line.get("level") in ("WARNING", "ERROR") for line in lines) + logs.count("Traceback"),
        up_share=statistics.mean(r.bytes_up for r in records) / num_agents / model_bytes,
        down_share=statistics.mean(r.bytes_down for r in later) / num_agents / model_bytes if later else 1.0,
    )


def show(figures: Figures) -> None:
    f = figures
    print(f"{f.num_agents} agents, {f.num_rounds} rounds, model of {f.model_bytes / 1e6:.2f} MB")
    print(f"updates per round: {min(f.num_updates)} to {max(f.num_updates)}; tasks: {f.counts}")
    print(f"warnings and errors of the servers: {f.complaints}")
    print(f"seconds per round: median {statistics.median(f.seconds):.2f}, maximum {max(f.seconds):.2f}")
    print(
        f"sent {f.up_share:.1%} of the model per client and round; received after the first {f.down_share:.1%}"
    )
    rounds = list(range(5, f.num_rounds + 1, 5)) or [f.num_rounds]
    print("\n| server | " + " | ".join(f"MB after round {r}" for r in rounds) + " |")
    print("|---|" + "---|" * len(rounds))
    for name, sizes in f.rss.items():
        print(f"| {name} | " + " | ".join(f"{sizes[r - 1] / 1e6:.1f}" for r in rounds) + " |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--loaders", type=int, default=3, help="number of processes that run the agents")
    parser.add_argument("--scale", type=int, default=12, help="side length of the fake model; 12 gives 0.23 MB")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--play", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.play:
        address, first, num_agents, of, folder = options.play
        asyncio.run(play(address, int(first), int(num_agents), int(of), Path(folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        figures, _ = asyncio.run(
            measure(options.agents, options.rounds, options.loaders, options.scale, Path(folder))
        )
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(vars(figures), indent=2))


if __name__ == "__main__":
    main()
