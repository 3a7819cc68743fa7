"""What an aggregator costs: memory against the number of clients, CPU against a bare gRPC server.

    python benchmarks/aggregator_load.py
    python benchmarks/aggregator_load.py --clients 10 100 --rounds 5 --json load.json

In a round every client downloads a whole model of VGG16's size (15.2 million float32, 32 tensors) from a real
aggregator process and sends a whole update back, over the loopback from other processes; nothing is trained.
For comparison there are two servers that check nothing, store nothing on disk and make no model:

* ``plain``: an ordinary gRPC service. It receives Chunk messages, joins an update and adds it to a float32
  array.
* ``bare``: the minimum for the same bytes. No messages; each piece is added when it arrives.

``--uploads-only`` leaves out the downloads.

CPU seconds and peak memory are those of the server process. The servers take turns, round by round, so that all
see the same machine. The minimum is shown next to the median, because other work on the machine only adds time.
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
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc import aio

from fedel.types import ModelSpec, Patch, Report, TensorSpec
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.model_pb2 import Chunk
from fedel.wire.channel import SERVER_OPTIONS, connect
from fedel.wire.payload import CHUNK_BYTES, pack
from fedel.wire.streams import fetch_model, model_header, push_model, push_update

ROOT = Path(__file__).resolve().parents[1]
CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
UPLOADS_ONLY = "FEDEL_BENCH_UPLOADS_ONLY"
NUM_LOADERS = 2
"""Number of processes that act as clients."""


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
                raise SystemExit("the server ended before it listened; see its output above")
            time.sleep(0.05)
        yield server.pid, port_file.read_text()
    finally:
        server.terminate()
        server.wait()


def load(kind: str, address: str, num_clients: int, round_num: int) -> None:
    """Let the clients of one round send, from separate processes."""
    share = -(-num_clients // NUM_LOADERS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    loaders = []
    for first in range(0, num_clients, share):
        numbers = map(str, (first, min(share, num_clients - first), round_num))
        words = [sys.executable, __file__, "--load", kind, address, *numbers]
        loaders.append(subprocess.Popen(words, env=environment))
    codes = [loader.wait() for loader in loaders]
    if any(codes):
        raise SystemExit("a client failed; see its output above")


async def play(kind: str, address: str, first: int, num_clients: int, round_num: int, fetch: bool) -> None:
    """Inside a loader process: some clients, each with its own connection."""
    payload = pack({name: Patch(array) for name, array in values(1).items()})

    async def update(client: int) -> None:
        async with connect(address) as channel:
            stub = AggregatorServiceStub(channel)
            if fetch:
                await fetch_model(stub, "load")
            report = Report(f"client-{client}", round_num, 100 + client, 50, 50.0, 0.5)
            await push_update(stub, "load", report, payload)

    async def send(_client: int) -> None:
        async with connect(address) as channel:
            if fetch:
                model: Any = channel.unary_stream("/load/Model")
                async for _ in model(b""):
                    pass
            method = "Pieces" if kind == "bare" else "Messages"
            pieces = (c.data if kind == "bare" else c.SerializeToString() for c in payload.chunks())
            call: Any = channel.stream_unary(f"/load/{method}")
            await call(pieces)

    work = update if kind == "aggregator" else send
    await asyncio.gather(*(work(client) for client in range(first, first + num_clients)))


class Sum:
    """What the other servers do with an update."""

    def __init__(self) -> None:
        self._sum = np.zeros(sum(t.size for t in vgg16().tensors), np.float32)

    def messages(self, requests: Iterator[Chunk], _context: Any) -> bytes:
        self._sum += np.frombuffer(b"".join(chunk.data for chunk in requests), np.float32)
        return b""

    def model(self, _request: bytes, _context: Any) -> Iterator[bytes]:
        """The model as it is in memory."""
        view = self._sum.view(np.uint8)
        for start in range(0, view.size, CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES].tobytes()

    async def model_pieces(self, request: bytes, context: Any) -> Any:
        for piece in self.model(request, context):
            yield piece

    async def pieces(self, requests: Any, _context: Any) -> bytes:
        position = 0
        async for data in requests:
            part = np.frombuffer(data, np.float32)
            self._sum[position : position + part.size] += part
            position += part.size
        return b""


def serve_plain(port_file: Path) -> None:
    total = Sum()
    handlers: Any = {
        "Messages": grpc.stream_unary_rpc_method_handler(total.messages, Chunk.FromString),
        "Model": grpc.unary_stream_rpc_method_handler(total.model),
    }
    server = grpc.server(ThreadPoolExecutor(10), options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("load", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    port_file.write_text(f"127.0.0.1:{port}")
    server.wait_for_termination()


async def serve_bare(port_file: Path) -> None:
    total = Sum()
    handlers: Any = {
        "Pieces": grpc.stream_unary_rpc_method_handler(total.pieces),
        "Model": grpc.unary_stream_rpc_method_handler(total.model_pieces),
    }
    server = aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("load", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    port_file.write_text(f"127.0.0.1:{port}")
    await server.wait_for_termination()


async def create(address: str) -> None:
    async with connect(address) as channel:
        header = model_header("load", {"name": "fedavg", "weighting": "samples"}, vgg16())
        await push_model(AggregatorServiceStub(channel), header, values(0))


async def open_round(address: str, round_num: int, num_clients: int) -> None:
    participants = [
        pb.Participant(
            client=f"client-{client}",
            round_num=round_num,
            num_samples=100 + client,
            max_steps=50,
            max_effective_steps=50.0,
        )
        for client in range(num_clients)
    ]
    async with connect(address) as channel:
        request = pb.OpenRoundRequest(run="load", round_num=round_num, participants=participants)
        await AggregatorServiceStub(channel).OpenRound(request)


async def close(address: str, round_num: int, num_clients: int) -> pb.CommitRoundResponse:
    async with connect(address) as channel:
        stub = AggregatorServiceStub(channel)
        answers = stub.SealRound(pb.SealRoundRequest(run="load", round_num=round_num))
        clients = [report.client async for answer in answers for report in answer.reports]
        assert len(clients) == num_clients
        return await stub.CommitRound(pb.CommitRoundRequest(run="load", round_num=round_num, clients=clients))


def aggregator(folder: Path) -> AbstractContextManager[tuple[int, str]]:
    address = folder / "aggregator.address"
    settings = {
        "listen": "127.0.0.1:0",
        "data_dir": folder / "data",
        "port_file": address,
        "log_level": "WARNING",
    }
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return process("-m", "fedel_aggregator", *options, port_file=address)


def other(kind: str, folder: Path) -> AbstractContextManager[tuple[int, str]]:
    address = folder / f"{kind}.address"
    return process(__file__, "--serve", kind, str(address), port_file=address)


def one_round(kind: str, pid: int, address: str, num_clients: int, round_num: int) -> dict[str, float]:
    cpu, wall = cpu_seconds(pid), time.monotonic()
    if kind == "aggregator":
        asyncio.run(open_round(address, round_num, num_clients))
    load(kind, address, num_clients, round_num)
    if kind == "aggregator":
        asyncio.run(close(address, round_num, num_clients))
    return {"cpu_seconds": cpu_seconds(pid) - cpu, "wall_seconds": time.monotonic() - wall}


def summary(name: str, num_clients: int, rounds: list[dict[str, float]], pid: int) -> dict[str, Any]:
    cpu = [r["cpu_seconds"] for r in rounds]
    return {
        "server": name,
        "clients": num_clients,
        "cpu_seconds": statistics.median(cpu),
        "least_cpu_seconds": min(cpu),
        "wall_seconds": statistics.median(r["wall_seconds"] for r in rounds),
        "peak_bytes": peak_bytes(pid),
    }


def compare(num_clients: int, num_rounds: int, folder: Path) -> list[dict[str, Any]]:
    """The aggregator and the two simple servers, in turns."""
    with aggregator(folder) as ours, other("plain", folder) as plain, other("bare", folder) as bare:
        asyncio.run(create(ours[1]))
        servers = {"aggregator": ours, "plain": plain, "bare": bare}
        rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in servers}
        for round_num in range(num_rounds):
            for kind, (pid, address) in servers.items():
                rounds[kind].append(one_round(kind, pid, address, num_clients, round_num))
        return [summary(kind, num_clients, rounds[kind], pid) for kind, (pid, _) in servers.items()]


def crowd(num_clients: int, folder: Path) -> dict[str, Any]:
    """One round of the aggregator with more clients."""
    with aggregator(folder) as (pid, address):
        asyncio.run(create(address))
        return summary("aggregator", num_clients, [one_round("aggregator", pid, address, num_clients, 0)], pid)


def show(rows: list[dict[str, Any]], model_bytes: int) -> None:
    print(
        f"model: {model_bytes / 1e6:.1f} MB, {len(vgg16().tensors)} tensors; {CHUNK_BYTES // 1024} KiB chunks\n"
    )
    print("| server | clients | CPU s per round | minimum | wall s per round | peak MB | peak in models |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        peak = row["peak_bytes"]
        print(
            f"| {row['server']} | {row['clients']} | {row['cpu_seconds']:.2f} | {row['least_cpu_seconds']:.2f} "
            f"| {row['wall_seconds']:.1f} | {peak / 1e6:.0f} | {peak / model_bytes:.2f} |"
        )
    ours = rows[0]
    print()
    for row in rows[1:]:
        if row["server"] == "aggregator":
            growth = row["peak_bytes"] / ours["peak_bytes"] - 1
            print(f"peak memory with {row['clients']} clients compared with {ours['clients']}: {growth:+.1%}")
        else:
            ratios = [ours[key] / row[key] for key in ("cpu_seconds", "least_cpu_seconds")]
            print(f"CPU compared with {row['server']}: {ratios[0]:.2f} (median), {ratios[1]:.2f} (minimum)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--rounds", type=int, default=3, help="rounds per server")
    parser.add_argument("--uploads-only", action="store_true", help="clients do not download a model")
    parser.add_argument("--json", type=Path, help="write the numbers to this file instead of printing them")
    parser.add_argument("--load", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        kind, address, *numbers = options.load
        return asyncio.run(play(kind, address, *map(int, numbers), not os.environ.get(UPLOADS_ONLY)))
    if options.serve:
        kind, port_file = options.serve
        return asyncio.run(serve_bare(Path(port_file))) if kind == "bare" else serve_plain(Path(port_file))
    if options.uploads_only:
        os.environ[UPLOADS_ONLY] = "1"  # for the loaders, which inherit it
    few, *more = options.clients
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(few, options.rounds, Path(folder))
    for num_clients in more:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(crowd(num_clients, Path(folder)))
    model_bytes = sum(4 * t.size for t in vgg16().tensors)
    show(rows, model_bytes)
    figures = json.dumps({"model_bytes": model_bytes, "rows": rows}, indent=2)
    print(f"\n{figures}") if options.json is None else options.json.write_text(figures)
    return None


if __name__ == "__main__":
    main()
