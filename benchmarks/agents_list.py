"""A long list of agents: seconds and memory of `fedel fleet` and `/api/agents`, with all agents connected.

    python benchmarks/agents_list.py
    python benchmarks/agents_list.py --agents 10000 --sessions 0

A real coordinator in its own process. ``--sessions`` of the agents have an open session; the others are in the
database, as if they had been here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fedel_coordinator.sql import SqlStore  # noqa: E402
from fedel_coordinator.store import AgentRow  # noqa: E402

from fedel.chaos.processes import Process  # noqa: E402
from fedel.v1 import coordinator_pb2 as pb  # noqa: E402
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub  # noqa: E402
from fedel.wire.channel import connect  # noqa: E402
from fedel.wire.protocol import PROTOCOL  # noqa: E402


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def row(number: int) -> AgentRow:
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
        error_at=time.time() if number % 10 == 0 else 0.0,
        error_message="RuntimeError: " + "x" * 200 if number % 10 == 0 else "",
        error_trace="x" * 8000 if number % 10 == 0 else "",
    )


async def session(stub: CoordinatorServiceStub, number: int) -> object:
    call = stub.Session()
    known = row(number)
    hello = pb.Hello(client=known.name, protocol=PROTOCOL, labels={"gpu": "orin", "site": "roof"})
    hello.device.CopyFrom(pb.DeviceFacts(device_type=known.device_type, memory_bytes=known.memory_bytes))
    await call.write(pb.SessionRequest(hello=hello))
    await call.read()
    return call


async def measure(num_agents: int, num_sessions: int, folder: Path) -> None:
    database = f"sqlite:///{folder}/c.db"
    store = SqlStore(database)
    begin = time.perf_counter()
    store.put_agents([row(number) for number in range(num_agents)])
    print(f"{num_agents} rows written in {time.perf_counter() - begin:.2f} s")
    store.close()
    settings = {
        "listen": "127.0.0.1:0",
        "port_file": str(folder / "port"),
        "http": "127.0.0.1:0",
        "http_port_file": str(folder / "http"),
        "database_url": database,
        "heartbeat_seconds": 60.0,
    }
    server = Process("fedel_coordinator", "coordinator", folder, settings)
    server.start()
    try:
        address = await server.address()
        print(f"coordinator at the start: {rss_mb(server.pid):.0f} MB")
        async with connect(address) as channel:
            stub = CoordinatorServiceStub(channel)
            kept = [await session(stub, number) for number in range(num_sessions)]
            print(f"with {len(kept)} sessions: {rss_mb(server.pid):.0f} MB")
            await asyncio.to_thread(ask, address, (folder / "http").read_text(encoding="utf-8"), server.pid)
    finally:
        server.kill()


def ask(address: str, page: str, pid: int) -> None:
    for words in (["fleet"], ["fleet", "--json"], ["fleet", "show", "jetson-00000"]):
        begin = time.perf_counter()
        command = [sys.executable, "-m", "fedel.cli.main", *words, "--coordinator", address]
        said = subprocess.run(command, check=True, capture_output=True, env={**os.environ}).stdout
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"fedel {' '.join(words)}: {seconds:.2f} s, {len(said)} bytes, at most {peak:.0f} MB")
    times, size, after = [], 0, ""
    for _ in range(5):
        begin, size, after = time.perf_counter(), 0, ""
        while after is not None:
            with urlopen(f"http://{page}/api/agents?after={after}") as answer:
                text = answer.read()
            size += len(text)
            end = text.partition(b'"next":')[2].partition(b",")[0]
            after = None if end == b"null" else end.decode().strip('"')
        times.append(time.perf_counter() - begin)
    print(f"/api/agents: {min(times):.3f} to {max(times):.3f} s, {size} bytes")
    print(f"coordinator after that: {rss_mb(pid):.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(arguments.agents, arguments.sessions, Path(folder)))


if __name__ == "__main__":
    main()
