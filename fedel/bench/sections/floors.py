"""The least that this machine can do with the bytes of an update: the floors that others are compared with."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedel.bench import bare
from fedel.bench.cpu import REPEATS, least_cpu, once
from fedel.bench.load import Load
from fedel.bench.page import table
from fedel.bench.section import Options, Row, Rows, Say, Section
from fedel.bench.workloads import workload
from fedel.errors import FedelError

NUM_BYTES = 64 << 20
PIECE = 1 << 20
GRPC_CLIENTS = 2
SENDER = """
import socket, sys
port, number, size = map(int, sys.argv[1:])
with socket.create_connection(("127.0.0.1", port)) as out:
    piece = bytes(size)
    for _ in range(number):
        out.sendall(piece)
"""


def measure(options: Options, _say: Say) -> Iterator[Row]:
    source = np.ones(NUM_BYTES // 4, np.float32)
    target = np.zeros_like(source)
    copy, add = least_cpu(lambda: np.copyto(target, source), lambda: np.add(target, source, out=target))
    yield {"what": "memcpy", "bytes": NUM_BYTES, "cpu_seconds": copy}
    yield {"what": "accumulate float32", "bytes": NUM_BYTES, "cpu_seconds": add}
    yield {"what": "receive, loopback TCP", "bytes": NUM_BYTES, **_tcp()}
    yield {"what": "write and fsync", "bytes": NUM_BYTES, **_disk(options.folder, source)}
    yield {"what": "gRPC stream, receive, add and send", **_grpc(options)}


def _tcp() -> Row:
    """CPU seconds of the receiver; another process sends."""
    seconds, walls, buffer = [], [], bytearray(PIECE)
    for _ in range(REPEATS):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            sender = [sys.executable, "-I", "-c", SENDER, port, str(NUM_BYTES // PIECE), str(PIECE)]
            with subprocess.Popen(sender), listener.accept()[0] as incoming:
                begin, received = time.monotonic(), 0

                def receive(incoming: socket.socket = incoming) -> None:
                    nonlocal received
                    while count := incoming.recv_into(buffer):
                        received += count

                seconds.append(once(receive))
                walls.append(time.monotonic() - begin)
                assert received == NUM_BYTES, "the sender sends all of it"
    return {"cpu_seconds": min(seconds), "seconds": min(walls)}


def _disk(folder: Path, source: np.ndarray) -> Row:
    file, view, seconds, walls = folder / "written", source.view(np.uint8).data, [], []

    def write() -> None:
        with file.open("wb", buffering=0) as out:
            for start in range(0, NUM_BYTES, PIECE):
                out.write(view[start : start + PIECE])
            os.fsync(out.fileno())

    for _ in range(3):
        begin = time.monotonic()
        seconds.append(once(write))
        walls.append(time.monotonic() - begin)
    file.unlink()
    return {"cpu_seconds": min(seconds), "seconds": min(walls)}


def _grpc(options: Options) -> Row:
    """The bare server: each client gets a model and sends one."""
    load = Load(workload("M"), GRPC_CLIENTS, 3, options.seconds)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        try:
            marks = bare.measure(load, Path(folder)).watch.marks
        except FedelError as error:
            return {"bytes": 0, "error": str(error)}
    rounds = [b.cpu_seconds - a.cpu_seconds for a, b in itertools.pairwise(marks)]
    return {"bytes": 2 * GRPC_CLIENTS * load.workload.num_bytes, "cpu_seconds": min(rounds)}


def show(rows: Rows) -> list[str]:
    lines = []
    for row in rows:
        if "error" in row:
            lines.append([row["what"], row["error"], "", ""])
            continue
        size, seconds = row["bytes"], row["cpu_seconds"]
        rate = f"{size / seconds / 1e9:.1f}" if seconds else ""
        wall = f"{size / row['seconds'] / 1e9:.1f}" if row.get("seconds") else ""
        lines.append([row["what"], f"{1000 * seconds * NUM_BYTES / size:.0f}", rate, wall])
    return table(["floor", f"CPU ms per {NUM_BYTES >> 20} MiB", "GB per CPU second", "GB per second"], lines)


SECTION = Section("floors", "What the machine can do", 10, measure, show, quick=True)
