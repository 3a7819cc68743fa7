"""Reaching the servers, one step at a time: name, port, the server's certificate, its health, its clock."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedel.security.folder import Credentials
from fedel.security.tls import host_of
from fedel.v1 import coordinator_pb2
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import with_metadata
from fedel.wire.clock import HEADER, Skew, skew
from fedel.wire.retry import describe, mistake
from fedel_edge.preflight.findings import ENROL, Finding, bad, good, skipped

TIMEOUT_SECONDS = 10.0
MOST_SKEW_SECONDS = 60.0
"""Clocks may be five minutes late for new certificates to be valid; logs need less to be comparable."""
_CLOCK = "set the clock: `timedatectl set-ntp true`, and check that a time server can be reached"


@dataclass(frozen=True)
class Reached:
    """The result of trying to reach a server."""

    finding: Finding
    skew: Skew | None = None
    aggregators: Sequence[str] = ()
    """Addresses that a coordinator sent."""

    @property
    def ok(self) -> bool:
        return self.finding.state == "good"


async def reach(check: str, address: str, own: Credentials | None, secret: str = "") -> Reached:
    """Connect to a server and request its health."""
    try:
        async with _channel(address, own, secret) as channel:
            return await _ask(check, address, channel)
    except aio.AioRpcError as error:
        problem = None
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            problem = await asyncio.to_thread(_probe, check, address, own)
        return Reached(problem or _refused(check, address, error))


def clock(reached: Reached) -> Finding:
    """How far the device's clock is off the coordinator's."""
    if not reached.ok:
        return skipped("clock", "the coordinator could not be reached for its time")
    if reached.skew is None:
        return skipped("clock", "this coordinator does not send its time: it is older than this agent")
    off, doubt = reached.skew
    late = (
        f"{abs(off):.2f} s {'behind' if off > 0 else 'ahead of'} the coordinator (give or take {doubt:.2f} s)"
    )
    if abs(off) - doubt > MOST_SKEW_SECONDS:
        return bad("clock", late, _CLOCK)
    return good("clock", late)


def _probe(check: str, address: str, own: Credentials | None) -> Finding | None:
    """What is wrong with name, port or the server's certificate: gRPC has one error for all of them."""
    host, port = host_of(address), address.rpartition(":")[2]
    try:
        with socket.create_connection((host, int(port)), TIMEOUT_SECONDS) as raw:
            if own is not None:
                context = ssl.create_default_context(cadata=own.ca.decode())
                context.set_alpn_protocols(["h2"])
                with context.wrap_socket(raw, server_hostname=host):
                    pass
    except socket.gaierror as error:
        remedy = f"correct `coordinator` if '{host}' is misspelt; else check the name server of this device"
        return bad(check, f"{address}: nobody knows the name ({error.strerror})", remedy)
    except ConnectionRefusedError:
        remedy = "start it there, or correct the port; it must listen on more than its loopback (`listen`)"
        return bad(check, f"{address}: the machine is there, but nobody listens on port {port}", remedy)
    except TimeoutError:
        remedy = f"check the address, the cable, and that no firewall drops connections to port {port}"
        return bad(check, f"{address}: no answer in {TIMEOUT_SECONDS:g} s", remedy)
    except ssl.SSLCertVerificationError as error:
        return bad(
            check, f"{address}: its certificate is not valid: {error.verify_message}", _distrusted(error)
        )
    except ssl.SSLError as error:
        remedy = "does the server have tls.dir? An agent with certificates does not use a port without TLS"
        return bad(check, f"{address}: the server there does not use TLS ({error.reason or error})", remedy)
    except (OSError, ValueError) as error:
        return bad(check, f"{address}: {error}", "check the address and the network of this device")
    return None


def _distrusted(error: ssl.SSLCertVerificationError) -> str:
    text = error.verify_message.lower()
    if "mismatch" in text:
        return "use a name that is in its certificate, or issue one with `fedel certs issue ... --host NAME`"
    if "expired" in text or "not yet valid" in text:
        return f"renew it at the server (`fedel certs renew`) if this device's clock is right; else {_CLOCK}"
    return "this is another federation's server: correct the address, or enrol here with a token of that one"


@asynccontextmanager
async def _channel(address: str, own: Credentials | None, secret: str) -> AsyncIterator[aio.Channel]:
    if own is None:
        channel = with_metadata(aio.insecure_channel(address), secret)
    else:
        channel = aio.secure_channel(address, grpc.ssl_channel_credentials(own.ca, own.key, own.cert))
    async with channel:
        yield channel


async def _ask(check: str, address: str, channel: aio.Channel) -> Reached:
    stub, begin = health_pb2_grpc.HealthStub(channel), time.monotonic()
    await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
    # The first call made the connection; the second measures the round trip.
    connecting = time.monotonic() - begin
    sent, call = time.time(), stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
    answer, received = await call, time.time()
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        remedy = "wait until it has started, or look at its log"
        return Reached(bad(check, f"{address}: there, but not ready", remedy))
    server_time = dict(await call.trailing_metadata() or ()).get(HEADER)
    round_trip = received - sent
    return Reached(
        good(
            check,
            f"{address} answers in {round_trip * 1e3:.0f} ms (connecting takes {connecting * 1e3:.0f} ms)",
        ),
        skew(server_time, sent, received) if server_time else None,
        await _aggregators(channel) if check == "coordinator" else (),
    )


async def _aggregators(channel: aio.Channel) -> Sequence[str]:
    stub: Any = CoordinatorServiceStub(channel)
    answer = await stub.ListAggregators(coordinator_pb2.ListAggregatorsRequest(), timeout=TIMEOUT_SECONDS)
    return tuple(answer.addresses)


def _refused(check: str, address: str, error: aio.AioRpcError) -> Finding:
    code, details = error.code(), describe(error)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return bad(check, f"{address} refuses this device: {details}", ENROL)
    if mistake(error):
        return bad(check, f"{address} is not the {check}: {details}", "correct the address or its port")
    if code is grpc.StatusCode.UNAVAILABLE:
        remedy = "is this device's certificate of the same federation, and does a gRPC server use this port?"
        return bad(check, f"{address} closes the connection: {details}", remedy)
    return bad(check, f"{address}: {code.name}: {details}", "look at the server's log")
