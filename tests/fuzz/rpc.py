"""Send hostile messages to real servers: every RPC of both services and of enrolment.

A batch of cases goes to servers that were started for it, in a process of their own. Then honest clients must
get through, no call may have ended as UNKNOWN or INTERNAL, no traceback may be in the log, and the servers must
not have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from fedel.security import certificates as x
from fedel.v1 import aggregator_pb2 as agg
from fedel.v1 import aggregator_pb2_grpc, code_pb2_grpc, coordinator_pb2_grpc, enrolment_pb2_grpc  # noqa: F401
from fedel.v1 import code_pb2 as code
from fedel.v1 import coordinator_pb2 as coord
from fedel.v1 import enrolment_pb2 as enrolment
from fedel.v1.model_pb2 import Chunk
from fedel.wire.codec import report_to_pb
from fedel.wire.payload import pack
from tests.fuzz import frames, samples
from tests.fuzz.batch import Finding, Summary, _print
from tests.fuzz.mutate import VALUES, message_case, mutate_bytes, mutate_message
from tests.fuzz.target import CORPUS
from tests.fuzz.targets.certificates import pem_case
from tests.fuzz.targets.wire import resealed
from tests.fuzz.worlds import HOSTILE, World, plain, secure
from tests.services.coordinator import support

BATCH = 1_000
AT_ONCE = 8
ANSWER_SECONDS = 60.0
"""A call that is not over by then hangs; a follower of a run is ended after its first answer."""
PATIENCE_SECONDS = 120.0
GROWTH_MEGABYTES = 64
"""By which the servers may grow over nine tenths of a batch, in which hundreds of agents join."""
MOST_HELD = 40
"""Sessions that stay open until the end of their batch."""
FOREIGN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
_FILES = (agg.DESCRIPTOR, coord.DESCRIPTOR, enrolment.DESCRIPTOR, code.DESCRIPTOR)
METHODS: Mapping[str, MethodDescriptor] = {
    method.name: method
    for file in _FILES
    for service in file.services_by_name.values()
    for method in service.methods
}


def _code() -> list[list[Message]]:
    """In two pieces; the signature is nobody's."""
    text = samples.CODE.text
    pieces = [code.PutCodeRequest(piece=part) for part in (text[:10], text[10:])]
    return [[code.PutCodeRequest(header=samples.CODE.header), *pieces]]


def _model(run: str) -> list[Message]:
    header = samples.first_model()
    header.run = run
    chunk = Chunk(offset=0, data=samples.model_payload())
    return [agg.CreateModelRequest(header=header), agg.CreateModelRequest(chunk=chunk)]


def _update(run: str, client: str) -> list[Message]:
    update = samples.whole_update(client)
    packed = pack(update.patches)
    header = agg.UpdateHeader(
        run=run, report=report_to_pb(update.report), tensors=packed.manifest, digest=packed.digest
    )
    chunk = Chunk(offset=0, data=b"".join(packed.buffers))
    return [agg.PutUpdateRequest(header=header), agg.PutUpdateRequest(chunk=chunk)]


def _sessions(client: str) -> list[list[Message]]:
    hello, join, *rest = samples.session_messages(client)
    return [[hello, join, message] for message in rest]


def _control(action: int) -> list[Message]:
    return [coord.ControlRunRequest(run=samples.RUN, action=action)]  # type: ignore[arg-type]


def _control_agent(client: str, action: int) -> list[Message]:
    labels = {"labels": {"gpu": "orin"}, "dropped": ["site"]}
    return [coord.ControlAgentRequest(name=client, action=action, **labels)]  # type: ignore[arg-type]


def _plan() -> Message:
    run = samples.create_run()
    return coord.PlanRunRequest(config_json=run.config_json, spec=run.spec, wait_seconds=0.05)


@lru_cache(maxsize=100)
def valid(method: str, client: str) -> tuple[tuple[Message, ...], ...]:
    """Valid streams of messages of each RPC; a single request is a stream of one."""
    key = {"run": samples.RUN, "round_num": 0}
    made: dict[str, Callable[[], Sequence[Sequence[Message]]]] = {
        "CreateModel": lambda: [_model(samples.RUN), _model(client)],
        "GetModel": lambda: [
            [agg.GetModelRequest(run=samples.RUN, version=-1, have_version=-1)],
            [agg.GetModelRequest(run=samples.RUN, version=0, tensors=[0, 2, 3], have_versions=[-1, 0, 5])],
        ],
        # Most of them of clients that are planned: more of what they send is looked at.
        "PutUpdate": lambda: [_update(samples.RUN, client), *[_update(samples.PLANNED, client)] * 3],
        "OpenRound": lambda: [[samples.open_round(run, [client])] for run in (samples.RUN, "other")],
        "DeleteRun": lambda: [
            [agg.DeleteRunRequest(run=run, dry_run=run == client)] for run in (client, "other")
        ],
        "EndRun": lambda: [[agg.EndRunRequest(run=run)] for run in (samples.RUN, "other")],
        "GetRevocationList": lambda: [[enrolment.GetRevocationListRequest()]],
        "SealRound": lambda: [[agg.SealRoundRequest(**key)]],
        "CommitRound": lambda: [[agg.CommitRoundRequest(**key, clients=[client])]],
        "KeepVersion": lambda: [[agg.KeepVersionRequest(run=samples.RUN, version=0, label="best")]],
        "Session": lambda: _sessions(client),
        "CreateRun": lambda: [[samples.create_run()], [samples.create_run("other")]],
        "ControlRun": lambda: [_control(action) for action in coord.RunAction.values()],
        "DeleteRuns": lambda: [
            [coord.DeleteRunsRequest(runs=[client, "other"])],
            [coord.DeleteRunsRequest(older_than_seconds=1e6, dry_run=True)],
        ],
        "GetResult": lambda: [[coord.GetResultRequest(run=samples.RUN)]],
        "ListRuns": lambda: [[coord.ListRunsRequest()]],
        "WatchRun": lambda: [[coord.WatchRunRequest(run=samples.RUN)]],
        "ListAgents": lambda: [
            [coord.ListAgentsRequest()],
            [coord.ListAgentsRequest(name=client)],
            [coord.ListAgentsRequest(selector="gpu=orin,site!=lab,!broken,name=a", after="a")],
        ],
        "ControlAgent": lambda: [_control_agent(client, action) for action in coord.AgentAction.values()],
        "PlanRun": lambda: [[_plan()]],
        "ListAggregators": lambda: [[coord.ListAggregatorsRequest()]],
        "Enrol": lambda: [[enrolment.EnrolRequest(secret="x" * 22, signing_request=_request())]],
        "PutCode": _code,
        "GetCode": lambda: [[code.GetCodeRequest(sha256=samples.CODE.header.sha256)]],
        "Renew": lambda: [[enrolment.RenewRequest(signing_request=_request())]],
    }
    return tuple(tuple(stream) for stream in made[method]())


def _change_upload(rng: Random, part: bytes, others: Sequence[bytes]) -> bytes:
    """Often only values of tensors or of the report: the rest of what the message says still fits."""
    message = agg.PutUpdateRequest()
    try:
        message.ParseFromString(part)
    except DecodeError:
        return mutate_bytes(rng, part, others)
    if rng.random() < 0.4:
        return message_case(agg.PutUpdateRequest)(rng, part, others)
    if message.WhichOneof("kind") == "header":
        mutate_message(rng, message.header.report)
    else:
        values = np.frombuffer(message.chunk.data[: len(message.chunk.data) // 4 * 4], "<f4").copy()
        for _ in range(rng.choice((1, 3, 20)) if len(values) else 0):
            values[rng.randrange(len(values))] = rng.choice((rng.gauss(0, 1), *VALUES))
        message.chunk.data = values.tobytes() + message.chunk.data[values.nbytes :]
    return message.SerializeToString()


def _resealed(data: bytes) -> bytes:
    """Checksums and digest that fit what is sent: an attacker can do that too."""
    parts = frames.split(data)
    try:
        first, *rest = [agg.PutUpdateRequest.FromString(part) for part in parts]
    except (DecodeError, ValueError):
        return data
    sealed = frames.split(
        resealed(frames.join([first.header.SerializeToString(), *(m.chunk.data for m in rest)]))
    )
    first.header.ParseFromString(sealed[0])
    return frames.join([first.SerializeToString(), *parts[1:]])


@cache
def _request() -> bytes:
    return x.new_request(x.new_key())


@dataclass(frozen=True)
class Rpc:
    """One RPC as a target."""

    method: MethodDescriptor
    tls: bool = False

    @property
    def name(self) -> str:
        return f"{'tls' if self.tls else 'rpc'}_{self.method.name}"

    @property
    def world(self) -> Callable[[Path, Collection[str]], Any]:
        return secure if self.tls else plain

    def client(self, number: int) -> str:
        """Who makes a call; with certificates it is always the same."""
        return HOSTILE if self.tls else f"{HOSTILE}-{number}"

    def case(self, seed: int, number: int) -> bytes:
        """A stream of messages, each after its length."""
        rng = Random(f"{self.name} {seed} {number}")
        stream = rng.choice(valid(self.method.name, self.client(number)))
        whole = frames.join([message.SerializeToString() for message in stream])
        changed = frames.frames_case(self._pick, 0.1 if self.method.name == "Session" else 0.5)(rng, whole, ())
        return _resealed(changed) if self.method.name == "PutUpdate" and rng.random() < 0.7 else changed

    def _pick(self, at: int, part: bytes) -> Any:
        if self.method.name == "PutUpdate":
            return _change_upload
        if "signing_request" in self.method.input_type.fields_by_name:
            return self._change_request
        return message_case(GetMessageClass(self.method.input_type))

    def _change_request(self, rng: Random, part: bytes, others: Sequence[bytes]) -> bytes:
        """Usually what stands inside the signing request."""
        kind = GetMessageClass(self.method.input_type)
        if rng.random() < 0.4:
            return message_case(kind)(rng, part, others)
        try:
            message: Any = kind.FromString(part)
        except DecodeError:
            return mutate_bytes(rng, part)
        message.signing_request = pem_case(rng, message.signing_request)
        return bytes(message.SerializeToString())


AGENT_METHODS = ("Session", "PutUpdate", "GetModel", "ListAggregators")
"""What any agent may call: whatever it sends, the run goes on."""
TLS_METHODS = ("PutUpdate", "GetModel", "Session", "Renew", "Enrol", "GetRevocationList", "PutCode", "GetCode")
RPCS: Mapping[str, Rpc] = {
    rpc.name: rpc
    for rpc in (
        *(Rpc(m) for m in METHODS.values() if m.containing_service.name != "EnrolmentService"),
        *(Rpc(METHODS[name], tls=True) for name in TLS_METHODS),
    )
}


async def call(
    world: World, method: MethodDescriptor, messages: Sequence[bytes]
) -> tuple[grpc.StatusCode, str]:
    """Make one call with these messages as they are; returns how it ended, and what was said about it."""
    service = method.containing_service
    channel = world.channel(service.name, method.name)
    path = f"/{service.full_name}/{method.name}"
    try:
        if method.client_streaming and method.server_streaming:
            stream = channel.stream_stream(path)
            if method.name == "Session" and len(world.held) < MOST_HELD and len(messages) % 2:
                await _hold(stream(), messages, world.held)
            else:
                await _converse(stream(timeout=ANSWER_SECONDS), messages)
        elif method.client_streaming:
            await channel.stream_unary(path)(iter(messages), timeout=ANSWER_SECONDS)
        elif method.server_streaming:
            following = channel.unary_stream(path)(messages[0] if messages else b"", timeout=ANSWER_SECONDS)
            async for _ in following:
                if method.name == "WatchRun":
                    following.cancel()
                    break
        else:
            await channel.unary_unary(path)(messages[0] if messages else b"", timeout=ANSWER_SECONDS)
    except aio.AioRpcError as error:
        # gRPC's own word for a connection that broke during a write.
        broke = error.code() is grpc.StatusCode.INTERNAL and "from Core" in (error.details() or "")
        return grpc.StatusCode.UNAVAILABLE if broke else error.code(), error.details() or ""
    except asyncio.InvalidStateError:
        # The server ended the stream while we were still writing.
        return grpc.StatusCode.ABORTED, ""
    return grpc.StatusCode.OK, ""


async def _hold(stream: Any, messages: Sequence[bytes], held: list[Any]) -> None:
    """Leave the session open: its client stays in the run, and the next plans reckon with it."""
    held.append(stream)
    with suppress(asyncio.InvalidStateError, aio.AioRpcError):
        for message in messages:
            await stream.write(message)


async def _converse(stream: Any, messages: Sequence[bytes]) -> None:
    try:
        for message in messages:
            await stream.write(message)
        await stream.done_writing()
    except (asyncio.InvalidStateError, aio.AioRpcError):
        code = await stream.code()
        if code is not grpc.StatusCode.OK:
            raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), await stream.details()) from None
    async for _ in stream:
        pass


async def run_batch(rpc: Rpc, cases: Sequence[tuple[int, bytes]], summary: Summary) -> list[Finding]:
    """Send the cases to servers of their own, then let the honest clients work."""
    findings: list[Finding] = []
    after = f"cases {cases[0][0]} to {cases[-1][0]}"
    # With certificates there is one client: its calls would only replace each other.
    gate = asyncio.Semaphore(1 if rpc.tls else AT_ONCE)

    async def one(world: World, number: int, data: bytes) -> None:
        async with gate:
            begin = time.perf_counter()
            code, details = await call(world, rpc.method, frames.split(data))
            seconds = time.perf_counter() - begin
        summary.cases += 1
        summary.accepted += code is grpc.StatusCode.OK
        summary.refused += code is not grpc.StatusCode.OK and code not in FOREIGN
        if seconds > summary.slowest_seconds:
            summary.slowest_seconds, summary.slowest_case = round(seconds, 3), number
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            summary.slow += 1
            findings.append(Finding(rpc.name, number, "TooSlow", details, data.hex()))
        if code in FOREIGN:
            findings.append(Finding(rpc.name, number, code.name, details[:200], data.hex()))

    with tempfile.TemporaryDirectory() as folder:
        async with rpc.world(Path(folder), {rpc.client(number) for number, _ in cases}) as world:
            first = len(cases) // 10
            await asyncio.gather(*(one(world, *case) for case in cases[:first]))
            before = world.server.megabytes
            await asyncio.gather(*(one(world, *case) for case in cases[first:]))
            summary.peak_megabytes = max(summary.peak_megabytes, round(world.server.megabytes - before, 1))
            try:
                if rpc.method.name in AGENT_METHODS:
                    await asyncio.wait_for(world.goes_on(), PATIENCE_SECONDS)
                for stream in world.held:
                    stream.cancel()
                await asyncio.wait_for(world.honest(), PATIENCE_SECONDS)
            except Exception as error:
                findings.append(
                    Finding(rpc.name, -1, f"Honest {type(error).__name__}", f"{after}: {str(error)[:200]}", "")
                )
            if not world.server.alive:
                findings.append(Finding(rpc.name, -1, "Died", f"{after}: the servers ended", ""))
    logged = {Finding(rpc.name, -1, error, f"log {place}", "") for error, place in world.server.errors}
    return findings + sorted(logged, key=str)


async def run(rpc: Rpc, seed: int, count: int) -> tuple[Summary, list[Finding]]:
    summary, findings = Summary(rpc.name), list[Finding]()
    kept = [(-1, path.read_bytes()) for path in sorted((CORPUS / rpc.name).glob("*"))]
    for first in range(0, count, BATCH):
        numbers = range(first, min(count, first + BATCH))
        cases = (kept if first == 0 else []) + [(number, rpc.case(seed, number)) for number in numbers]
        findings += await run_batch(rpc, cases, summary)
    if summary.peak_megabytes > GROWTH_MEGABYTES:
        findings.append(Finding(rpc.name, count, "Memory", f"grew by {summary.peak_megabytes} MB", ""))
    for finding in findings:
        if finding.error != "TooSlow":
            summary.foreign += 1
            summary.errors[finding.error] = summary.errors.get(finding.error, 0) + 1
    return summary, _few(findings)


def _few(findings: list[Finding]) -> list[Finding]:
    """Two of those that fail in the same way at the same line."""
    places: dict[tuple[str, str], int] = {}
    chosen = []
    for finding in findings:
        key = (finding.error, finding.place)
        places[key] = places.get(key, 0) + 1
        if places[key] <= 2:
            chosen.append(finding)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rpc", choices=RPCS)
    parser.add_argument("seed", type=int)
    parser.add_argument("cases", type=int)
    options = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # or the last resort prints every line
    support.STEP_SECONDS = PATIENCE_SECONDS
    summary, findings = asyncio.run(run(RPCS[options.rpc], options.seed, options.cases))
    for record in (*findings, summary):
        _print(record)


if __name__ == "__main__":
    sys.exit(main())
