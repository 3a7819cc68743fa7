"""The floor of a server: it takes the same bytes over gRPC, adds them up, gives them out, and that is all.

    python -m fedel.bench.bare serve SIZE PORT_FILE [FOLDER]
    python -m fedel.bench.bare play SIZE ADDRESS NUM_CLIENTS NUM_ROUNDS ROUNDS_FILE

No messages, no checks, no checksums, no model: each piece is added when it arrives. With a folder, all that a
client sends is on disk there before it gets its answer; without one, nothing is stored.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc import aio

from fedel.bench.follow import ROUNDS, follow
from fedel.bench.load import Load, Outcome
from fedel.bench.ours import START_SECONDS, process
from fedel.bench.proc import Watch
from fedel.bench.workloads import values, workload
from fedel.errors import ServiceError
from fedel.files import write_atomic
from fedel.types import Patch
from fedel.wire.channel import SERVER_OPTIONS, connect
from fedel.wire.payload import CHUNK_BYTES, pack

IDLE_SECONDS = 60.0


def measure(load: Load, folder: Path, *, stores: bool = False) -> Outcome:
    port_file, size = folder / "bare.address", load.workload.name
    stored = [str(folder)] if stores else []
    with ExitStack() as stack:

        def start(name: str, *words: str) -> Any:
            log = folder / f"{name}.log"
            return stack.enter_context(process(log, folder, "fedel.bench.bare", *words))

        server = start("server", "serve", size, str(port_file), *stored)
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise ServiceError(f"the bare server did not listen; see {folder}")
            time.sleep(0.05)
        words = (size, port_file.read_text(encoding="utf-8"), str(load.num_clients), str(load.num_rounds))
        loader = start("clients", "play", *words, str(folder / ROUNDS))
        return follow(load, folder, Watch((server.pid,)), [server.pid, loader.pid])


class Sum:
    def __init__(self, size: int, folder: Path | None) -> None:
        self._sum = np.zeros(size, np.float32)
        self._folder = folder
        self._free: list[int] = []
        """Files of uploads that have ended: a file that is written again costs less than a new one."""

    async def pieces(self, requests: AsyncIterator[bytes], _context: Any) -> bytes:
        file, position = self._file(), 0
        async for data in requests:
            part = np.frombuffer(data, np.float32)
            self._sum[position : position + part.size] += part
            if file is not None:
                os.pwrite(file, data, 4 * position)
            position += part.size
        if file is not None:
            await asyncio.to_thread(os.fdatasync, file)
            self._free.append(file)
        return b""

    def _file(self) -> int | None:
        if self._folder is None:
            return None
        if self._free:
            return self._free.pop()
        return tempfile.mkstemp(dir=self._folder)[0]

    async def model(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        view = self._sum.view(np.uint8)
        for start in range(0, view.size, CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES].tobytes()


async def serve(size: str, port_file: Path, folder: Path | None = None) -> None:
    total = Sum(workload(size).num_bytes // 4, folder)
    handlers: Any = {
        "Pieces": grpc.stream_unary_rpc_method_handler(total.pieces),
        "Model": grpc.unary_stream_rpc_method_handler(total.model),
    }
    server = aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write_atomic(port_file, f"127.0.0.1:{port}", durable=False)
    await server.wait_for_termination()


async def play(size: str, address: str, num_clients: int, num_rounds: int, rounds: Path) -> None:
    payload = pack({name: Patch(array) for name, array in values(workload(size), 1).items()})

    def pieces() -> Iterator[bytes]:
        for chunk in payload.chunks():
            yield chunk.data

    async def client() -> None:
        async with connect(address) as channel:
            model: Any = channel.unary_stream("/bench/Model")
            async for _ in model(b""):
                pass
            call: Any = channel.stream_unary("/bench/Pieces")
            await call(pieces())

    for number in range(num_rounds):
        await asyncio.gather(*(client() for _ in range(num_clients)))
        with rounds.open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")
    await asyncio.sleep(IDLE_SECONDS)  # until it is ended


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    if kind == "serve":
        asyncio.run(serve(given[0], *map(Path, given[1:])))
    else:
        asyncio.run(play(given[0], given[1], int(given[2]), int(given[3]), Path(given[4])))
