"""``python -m fedel_services.probe [HOST:PORT]``: exit code 0 if the service at ``health`` is ready."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ADDRESS = "127.0.0.1:7079"
"""The address of ``health`` in our container images."""
SECONDS = 2.0


def is_ready(address: str, seconds: float = SECONDS) -> bool:
    """Whether the service at this address says that it is serving."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(arguments: Sequence[str]) -> int:
    address = arguments[0] if arguments else ADDRESS
    if is_ready(address):
        return 0
    print(f"no service is ready at {address}: see its log", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
