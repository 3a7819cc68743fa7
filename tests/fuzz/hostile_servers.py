"""A coordinator and an aggregator that send whatever a case holds to a real agent.

A case is what the coordinator pushes, or the answer to one download or one upload of a task. After every few
cases the servers behave: then the agent must join a run and do a task.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from fedel_edge import session
from fedel_edge.gate import Limits
from google.protobuf.message import DecodeError

from fedel.v1 import aggregator_pb2 as agg
from fedel.v1 import coordinator_pb2 as coord
from fedel.v1.coordinator_pb2 import SessionResponse
from fedel.wire.protocol import PROTOCOL
from tests.agents.stand_ins import RUN, SPEC, Aggregator, Federation, federation, run_table, running, task_of
from tests.fuzz import frames
from tests.fuzz.batch import Finding, Summary, _print
from tests.fuzz.mutate import message_case
from tests.fuzz.samples import download_messages

SESSION, DOWNLOAD, UPLOAD = HOSTILE_SERVERS = ("server_Session", "server_GetModel", "server_PutUpdate")
PATIENCE_SECONDS = 60.0
HONEST_ROUND = 10**6
"""Rounds from here on are honest ones."""
HONEST_EVERY = 10
"""Cases."""


class RawAggregator(Aggregator):
    """Answers the next download or upload with the parts of a case, then behaves."""

    def __init__(self) -> None:
        super().__init__()
        self.case: dict[str, list[bytes]] = {}

    def _next(self, method: str, kind: Any) -> list[Any]:
        messages = []
        for part in self.case.pop(method, []):
            with suppress(DecodeError):  # gRPC would end the call there
                messages.append(kind.FromString(part))
        return messages

    async def GetModel(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if "GetModel" in self.case:
            for message in self._next("GetModel", agg.GetModelResponse):
                yield message
            return
        self.versions.setdefault(request.version, self.versions[0])
        for have in request.have_versions:
            self.versions.setdefault(have, self.versions[0])
        async for message in super().GetModel(request, context):
            yield message

    async def PutUpdate(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        if "PutUpdate" in self.case:
            for message in self._next("PutUpdate", agg.PutUpdateResponse):
                yield message
            return
        async for message in super().PutUpdate(requests, context):
            yield message


def _session_messages(address: str) -> list[SessionResponse]:
    key = {"run": RUN}
    offer = coord.RunOffer(**key, config_json=run_table(), model_digest=SPEC.digest, instance="7")
    offer.shards.add(address=address)
    return [
        SessionResponse(welcome=coord.Welcome(heartbeat_seconds=0.5, protocol=PROTOCOL)),
        SessionResponse(run=offer),
        SessionResponse(task=task_of(3)),
        SessionResponse(evaluate=coord.EvaluationTask(**key, model_version=1)),
        SessionResponse(closed=coord.RoundClosed(**key, round_num=1)),
        SessionResponse(ended=coord.RunEnded(**key)),
        SessionResponse(refused=coord.JoinRefused(**key, reason="no")),
    ]


def case(name: str, seed: int, number: int, address: str) -> bytes:
    """Messages, each after its length."""
    rng = Random(f"{name} {seed} {number}")
    messages: Sequence[Any]
    if name == SESSION:
        kind, messages = SessionResponse, rng.sample(_session_messages(address), 2)
    elif name == DOWNLOAD:
        kind, messages = agg.GetModelResponse, download_messages()
        messages[0].content.version = number
    else:
        kind = agg.PutUpdateResponse
        permit = kind(permit=agg.UploadPermit(offset=0))
        messages = [permit, kind(receipt=agg.UploadReceipt(digest="0" * 64))]
    whole = frames.join([message.SerializeToString() for message in messages])
    return frames.frames_case(lambda _at, _part: message_case(kind))(rng, whole, ())


class Drill:
    """One agent, and what is done to it."""

    def __init__(self, fed: Federation) -> None:
        self.fed, self.coordinator = fed, fed.coordinator

    async def attack(self, name: str, number: int, data: bytes) -> None:
        if name == SESSION:
            for part in frames.split(data):
                with suppress(DecodeError):
                    self.coordinator._outgoing.put_nowait(SessionResponse.FromString(part))
            return
        method = "GetModel" if name == DOWNLOAD else "PutUpdate"
        self.fed.aggregator.case[method] = frames.split(data)  # type: ignore[attr-defined]
        await self.task(number)

    async def task(self, number: int) -> None:
        """A task is done, or the agent says why not."""
        self.coordinator.push(task=task_of(number, model_version=number))

        def settled() -> bool:
            done = any(m.report.round_num == number for m in self.coordinator.all("done"))
            return done or any(m.round_num == number for m in self.coordinator.all("failed"))

        await self._until(settled)

    async def behave(self, number: int) -> None:
        """The agent joins a run that is offered again, and does a task of it."""
        for join in self.coordinator.all("join"):
            if join.run != RUN:
                self.coordinator.push(ended=coord.RunEnded(run=join.run, phase=coord.RUN_PHASE_STOPPED))
        self.coordinator.received.clear()
        num_offers, end = 0, time.monotonic() + PATIENCE_SECONDS
        while not any(m.report.round_num == number for m in self.coordinator.all("done")):
            # An offer may be lost with a session that the agent had reason to end: a new session has a new one.
            if num_offers <= len(self.coordinator.all("hello")):
                self.fed.offer(instance=f"honest {number}")
                num_offers += 1
            # The run may not be ready yet: then the agent says so, and is asked again.
            self.coordinator.push(task=task_of(number, model_version=0))
            await asyncio.sleep(0.1)
            if time.monotonic() > end:
                raise asyncio.TimeoutError

    async def _until(self, condition: Any) -> None:
        async with self.coordinator._change:
            await asyncio.wait_for(self.coordinator._change.wait_for(condition), PATIENCE_SECONDS)


async def run(name: str, seed: int, count: int) -> tuple[Summary, list[Finding]]:
    summary, findings = Summary(name), list[Finding]()
    # A wrong protocol makes an agent wait as after seven failures, which here would be most of the time.
    with tempfile.TemporaryDirectory() as folder, patch.object(session, "_REFUSED_FAILURES", 1):
        settings: Any = {"aggregators": [RawAggregator()], "limits": Limits(max_task_seconds=600.0)}
        async with federation(Path(folder) / "state", **settings) as fed, running(fed.agent()) as agent:
            try:
                await _run_cases(Drill(fed), name, seed, count, summary)
            except asyncio.TimeoutError:
                data = case(name, seed, summary.cases, fed.addresses[0])
                findings.append(
                    Finding(name, summary.cases, "Silent", "the agent does nothing more", data.hex())
                )
            if agent.done() and (error := agent.exception()) is not None:
                findings.append(Finding(name, summary.cases, type(error).__name__, str(error)[:200], ""))
        strangers = [path.name for path in Path(folder).iterdir() if path.name != "state"]
        if strangers:
            findings.append(Finding(name, count, "Outside", f"files beside its folder: {strangers}", ""))
    summary.foreign = len(findings)
    return summary, findings


async def _run_cases(drill: Drill, name: str, seed: int, count: int, summary: Summary) -> None:
    await drill.coordinator.until("hello")
    await drill.behave(HONEST_ROUND)
    before = 0.0
    for number in range(1, count + 1):
        data, begin = case(name, seed, number, drill.fed.addresses[0]), time.perf_counter()
        summary.cases = number
        await drill.attack(name, number, data)
        if number % HONEST_EVERY == 0 or number == count:
            await drill.behave(HONEST_ROUND + number)
        summary.slowest_seconds = max(summary.slowest_seconds, round(time.perf_counter() - begin, 3))
        before = before or (_megabytes() if number > count / 10 else 0.0)
    summary.peak_megabytes = round(_megabytes() - before, 1)


def _megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=HOSTILE_SERVERS)
    parser.add_argument("seed", type=int)
    parser.add_argument("cases", type=int)
    options = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # or the last resort prints every line
    summary, findings = asyncio.run(run(options.name, options.seed, options.cases))
    for record in (*findings, summary):
        _print(record)


if __name__ == "__main__":
    main()
