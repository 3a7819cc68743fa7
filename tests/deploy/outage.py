"""Runs in the coordinator's pod (``python3 - ADDRESS NUM_OUTAGES``): how long a shard was away, and not found.

It calls the shard's health service over a channel as the coordinator's own, and meanwhile looks whether the
shard's name has an address at which somebody listens. Prints one JSON line for each outage that ended, and
ends after that many of them.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time

from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedel.security.tls import Tls
from fedel.wire.channel import Dialer
from fedel.wire.retry import backoff_seconds, is_transient

CERTS = "/var/lib/fedel/certs"
STEP_SECONDS = 0.1
MAX_SECONDS = 300.0
LONGEST_WAIT_SECONDS = 2.0
"""As in fedel_coordinator/shards.py."""


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except OSError:
        return False
    return True


async def main(address: str, num_outages: int) -> None:
    dialer, ends = Dialer(Tls(dir=CERTS), near=True), time.monotonic() + MAX_SECONDS
    stub = health_pb2_grpc.HealthStub(dialer.channel(address))
    lost, failures, back, looking = 0.0, 0, 0.0, None

    async def look() -> float:
        while not await asyncio.to_thread(listens, address):
            await asyncio.sleep(STEP_SECONDS)
        return time.monotonic()

    while num_outages > 0 and time.monotonic() < ends:
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        except Exception as error:
            if not is_transient(error):
                raise
            if looking is None:
                lost, looking = time.monotonic(), asyncio.ensure_future(look())
            await asyncio.sleep(backoff_seconds(failures, LONGEST_WAIT_SECONDS))
            failures += 1
            continue
        if looking is not None:
            back = min(await looking, now := time.monotonic())
            print(json.dumps({"away_seconds": back - lost, "found_seconds": now - back}), flush=True)
            num_outages -= 1
        failures, looking = 0, None
        await asyncio.sleep(STEP_SECONDS)
    await dialer.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
