"""What an aggregator costs: memory against the number of clients, CPU against a bare gRPC server.

    python benchmarks/aggregator_load.py
    python benchmarks/aggregator_load.py --clients 10 100 --rounds 3 --json load.json

A real aggregator process gets whole updates of a model of VGG16's size (15.2 million float32, 32 tensors) from
clients in other processes over loopback; nothing is trained. The bare server beside it does the least that can be
done with the same bytes: it receives them over a gRPC stream and adds them, as float32, to one array. It checks
nothing, keeps nothing on disk and makes no model. CPU seconds and peak memory are the server process's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc import aio

from fedel.types import ModelSpec, Patch, Report, TensorSpec
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.wire.channel import SERVER_OPTIONS, connect
from fedel.wire.payload import CHUNK_BYTES, pack
from fedel.wire.streams import model_header, push_model, push_update

ROOT = Path(__file__).resolve().parents[1]
CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
NUM_LOADERS = 2
"""Processes that play the clients."""


def vgg16() -> ModelSpec:
    shapes: list[tuple[int, ...]] = []
    for before, after in zip((3, *CHANNELS), CHANNELS, strict=False):
        shapes += [(after, before, 3, 3), (after,)]
    shapes += [(512, 512), (512,), (512, 512), (512,), (10, 512), (10,)]
    return ModelSpec("vgg16", ("all",), tuple(TensorSpec(f"{i:02d}", 1, s) for i, s in enumerate(shapes)))


def values(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {t.name: rng.standard_normal(t.shape, np.float32) * np.float32(0.05) for t in vgg16().tensors}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@contextmanager
def process(*words: str, port_file: Path) -> Iterator[tuple[int, str]]:
    """A server process: its id and address."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment)
    try:
        while not port_file.exists():
            if server.poll() is not None:
                raise SystemExit("the server ended before it listened; its words are above")
            time.sleep(0.05)
        yield server.pid, port_file.read_text()
    finally:
        server.terminate()
        server.wait()


def load(kind: str, address: str, num_clients: int, round_num: int) -> None:
    """Let the clients of one round send, from processes of their own."""
    share = -(-num_clients // NUM_LOADERS)
    loaders = [
        subprocess.Popen(
            [sys.executable, __file__, "--load", kind, address, str(first), str(min(share, num_clients - first)),
             str(round_num)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for first in range(0, num_clients, share)
    ]  # fmt: skip
    if any([loader.wait() for loader in loaders]):
        raise SystemExit("a client failed; its words are above")


async def play(kind: str, address: str, first: int, num_clients: int, round_num: int) -> None:
    """Inside a loader: some clients, each with a connection of its own."""
    payload = pack({name: Patch(array) for name, array in values(1).items()})

    async def update(client: int) -> None:
        async with connect(address) as channel:
            report = Report(f"client-{client}", round_num, 100 + client, 50, 50.0, 0.5)
            await push_update(AggregatorServiceStub(channel), "load", report, payload)

    async def bare(_client: int) -> None:
        async with connect(address) as channel:
            send = channel.stream_unary("/bare/Put")
            await send(chunk.data for chunk in payload.chunks())

    work = update if kind == "fedel" else bare
    await asyncio.gather(*(work(client) for client in range(first, first + num_clients)))


class Bare:
    """The least a server can do: receive and add."""

    def __init__(self) -> None:
        self._sum = np.zeros(sum(t.size for t in vgg16().tensors), np.float32)

    def _add(self, data: bytes, position: int) -> int:
        part = np.frombuffer(data, np.float32)
        self._sum[position : position + part.size] += part
        return position + part.size

    def put(self, requests: Iterator[bytes], _context: Any) -> bytes:
        position = 0
        for data in requests:
            position = self._add(data, position)
        return b""

    async def put_aio(self, requests: Any, _context: Any) -> bytes:
        position = 0
        async for data in requests:
            position = self._add(data, position)
        return b""


def _handlers(method: Any) -> tuple[grpc.GenericRpcHandler]:
    return (
        grpc.method_handlers_generic_handler("bare", {"Put": grpc.stream_unary_rpc_method_handler(method)}),
    )


def serve_bare(port_file: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(10), options=SERVER_OPTIONS, handlers=_handlers(Bare().put))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    port_file.write_text(f"127.0.0.1:{port}")
    server.wait_for_termination()


async def serve_bare_aio(port_file: Path) -> None:
    server = aio.server(options=SERVER_OPTIONS, handlers=_handlers(Bare().put_aio))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    port_file.write_text(f"127.0.0.1:{port}")
    await server.wait_for_termination()


async def create(address: str) -> None:
    async with connect(address) as channel:
        header = model_header("load", {"name": "fedavg", "weighting": "samples"}, vgg16())
        await push_model(AggregatorServiceStub(channel), header, values(0))


async def close(address: str, round_num: int, num_clients: int) -> pb.CommitRoundResponse:
    async with connect(address) as channel:
        stub = AggregatorServiceStub(channel)
        sealed = await stub.SealRound(pb.SealRoundRequest(run="load", round_num=round_num))
        assert len(sealed.reports) == num_clients
        clients = [report.client for report in sealed.reports]
        return await stub.CommitRound(pb.CommitRoundRequest(run="load", round_num=round_num, clients=clients))


def measure_fedel(num_clients: int, num_rounds: int, folder: Path) -> dict[str, Any]:
    settings = {"listen": "127.0.0.1:0", "data_dir": folder / "data", "port_file": folder / "fedel.address",
                "log_level": "WARNING"}  # fmt: skip
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with process("-m", "services.aggregator", *options, port_file=folder / "fedel.address") as (pid, address):
        at_start = peak_bytes(pid)
        asyncio.run(create(address))
        rounds = []
        for round_num in range(num_rounds):
            cpu, wall = cpu_seconds(pid), time.monotonic()
            load("fedel", address, num_clients, round_num)
            answer = asyncio.run(close(address, round_num, num_clients))
            rounds.append(
                {
                    "cpu_seconds": cpu_seconds(pid) - cpu,
                    "wall_seconds": time.monotonic() - wall,
                    "fold_seconds": answer.fold_seconds,
                    "commit_seconds": answer.commit_seconds,
                }
            )
        median = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        return {"clients": num_clients, **median, "start_bytes": at_start, "peak_bytes": peak_bytes(pid)}


def measure_bare(kind: str, num_clients: int, num_rounds: int, folder: Path) -> dict[str, Any]:
    port_file = folder / f"{kind}.address"
    with process(__file__, "--serve", kind, str(port_file), port_file=port_file) as (pid, address):
        rounds = []
        for round_num in range(num_rounds):
            cpu, wall = cpu_seconds(pid), time.monotonic()
            load("bare", address, num_clients, round_num)
            rounds.append((cpu_seconds(pid) - cpu, time.monotonic() - wall))
        return {
            "clients": num_clients,
            "cpu_seconds": statistics.median(r[0] for r in rounds),
            "wall_seconds": statistics.median(r[1] for r in rounds),
            "peak_bytes": peak_bytes(pid),
        }


def show(results: dict[str, list[dict[str, Any]]], model_bytes: int) -> None:
    print(
        f"\nmodel: {model_bytes / 1e6:.1f} MB in {len(vgg16().tensors)} tensors, chunks of {CHUNK_BYTES // 1024} KiB\n"
    )
    print("| server | clients | CPU s a round | wall s a round | peak MB | peak, models |")
    print("|---|---|---|---|---|---|")
    for name, rows in results.items():
        for row in rows:
            peak = row["peak_bytes"]
            print(
                f"| {name} | {row['clients']} | {row['cpu_seconds']:.2f} | {row['wall_seconds']:.1f} "
                f"| {peak / 1e6:.0f} | {peak / model_bytes:.2f} |"
            )
    fedel = results["aggregator"]
    for name in ("bare grpc", "bare grpc.aio"):
        ratio = fedel[0]["cpu_seconds"] / results[name][0]["cpu_seconds"]
        print(f"\nCPU of the aggregator over {name}, {fedel[0]['clients']} clients: {ratio:.2f}")
    for row in fedel[1:]:
        growth = row["peak_bytes"] / fedel[0]["peak_bytes"] - 1
        print(f"\npeak memory at {row['clients']} clients against {fedel[0]['clients']}: {growth:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each; the median is told")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--load", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        kind, address, *numbers = options.load
        return asyncio.run(play(kind, address, *map(int, numbers)))
    if options.serve:
        kind, port_file = options.serve
        return asyncio.run(serve_bare_aio(Path(port_file))) if kind == "aio" else serve_bare(Path(port_file))
    results: dict[str, list[dict[str, Any]]] = {"aggregator": []}
    few = options.clients[0]
    for num_clients in options.clients:
        with tempfile.TemporaryDirectory() as folder:
            rounds = options.rounds if num_clients == few else 1
            results["aggregator"].append(measure_fedel(num_clients, rounds, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        results["bare grpc"] = [measure_bare("sync", few, options.rounds, Path(folder))]
        results["bare grpc.aio"] = [measure_bare("aio", few, options.rounds, Path(folder))]
    model_bytes = sum(4 * t.size for t in vgg16().tensors)
    show(results, model_bytes)
    if options.json:
        options.json.write_text(json.dumps({"model_bytes": model_bytes, **results}, indent=2))
    return None


if __name__ == "__main__":
    main()
