"""A hostile agent with a certificate like any other's: every attack that we know, again and again, at once.

An attack is a coroutine that is repeated until the test ends. What a server answers is counted by attack; a
receipt for one of its updates would mean that it counted, so it is kept as well.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from grpc import aio

from fedel.security import certificates as x
from fedel.security.folder import ensure_key
from fedel.security.identity import AGENT, RULES
from fedel.security.tls import Tls
from fedel.types import ModelSpec, Patch, Report, TimingProfile
from fedel.v1 import aggregator_pb2 as agg
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import enrolment_pb2, task_pb2
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.v1.enrolment_pb2_grpc import EnrolmentServiceStub
from fedel.wire.channel import connect
from fedel.wire.codec import profile_to_pb, report_to_pb
from fedel.wire.payload import Payload, pack
from fedel.wire.streams import fetch_model, reason_of
from tests.security.support import Servers
from tests.strategies.fakes import initial_model, profile

NAME = "mallory"
OTHER = "client-0"
PAUSE_SECONDS = 0.02
HOLD_SECONDS = 2.0
"""How long it sits on what it holds, before it takes the next."""
MANY = 20
LONG = "x" * 900_000
"""Just below the largest message of a session."""
ODD = "\x1b]0;mine\x07\x1b[2J[/red][link=http://evil]\n" + "y" * 5_000


class Hostile:
    """``joins``: it also joins the run, and so gets tasks; otherwise it only tries with what is refused."""

    def __init__(self, made: Servers, tls: Tls, run: str, ended_run: str, spec: ModelSpec, joins: bool) -> None:
        self._made, self._tls, self._run, self._ended_run = made, tls, run, ended_run
        self._spec, self._joins = spec, joins
        self.times: Counter[str] = Counter()
        """How often each attack was carried out."""
        self.answers: Counter[tuple[str, str]] = Counter()
        """What servers answered to each."""
        self.receipts: list[str] = []
        """Attacks after which an update of ours counted."""
        self._round = 0

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Hostile]:
        sessions = [
            self.mad_joins,
            self.unknown_runs,
            self.odd_hellos,
            self.evaluations,
            self.flood,
            self.unread,
        ]
        # A session takes the place of its older one, so these come one after the other.
        lines: list[list[Callable[[], Awaitable[None]]]] = [
            [attack for one in sessions for attack in (one, self.member)],
            [self.endless_varint, self.garbage],
            [self.uploads],
            [self.held_permit],
            [self.unread_downloads],
            [self.silent_streams],
            [self.forbidden_calls],
            [self.renewals],
        ]
        async with (
            connect(self._made.coordinator_address, self._tls) as near,
            connect(self._made.aggregator_address, self._tls) as bulk,
        ):
            self._coordinator, self._aggregator = near, bulk
            self._sessions, self._bulk = CoordinatorServiceStub(near), AggregatorServiceStub(bulk)
            tasks = [asyncio.create_task(self._repeat(line)) for line in lines]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                raise AssertionError("an attack of the test is wrong") from error

    async def _repeat(self, attacks: list[Callable[[], Awaitable[None]]]) -> None:
        while True:
            for attack in attacks:
                name = getattr(attack, "__name__", "")
                await self._answer(name, attack())
                self.times[name] += 1
                await asyncio.sleep(PAUSE_SECONDS)

    async def _answer(self, attack: str, call: Awaitable[Any]) -> None:
        """Carry it out, and count how it was answered."""
        try:
            await call
        except aio.AioRpcError as error:
            self.answers[attack, f"{error.code().name} {reason_of(error)}".strip()] += 1
        except asyncio.InvalidStateError:
            self.answers[attack, "ended while sending"] += 1
        else:
            self.answers[attack, "OK"] += 1

    # Sessions

    @asynccontextmanager
    async def _session(self, device_type: str = "fake") -> AsyncIterator[Any]:
        call = self._sessions.Session()
        try:
            device = pb.DeviceFacts(device_type=device_type)
            await call.write(pb.SessionRequest(hello=pb.Hello(client=NAME, device=device)))
            yield call
        finally:
            call.cancel()

    def _join(self, told: TimingProfile, **changes: Any) -> pb.SessionRequest:
        join = pb.Join(
            run=self._run, model_digest=self._spec.digest, num_samples=100, profile=profile_to_pb(told)
        )
        for name, value in changes.items():
            setattr(join, name, value)
        return pb.SessionRequest(join=join)

    async def mad_joins(self) -> None:
        told = profile(1.0, self._spec)
        first, *rest = told.tensors
        mad = [
            replace(told, tensors=(replace(first, block=99), *rest)),
            replace(told, tensors=(replace(first, update_seconds=1e308), *rest)),
            replace(told, tensors=(replace(first, name=LONG[:9000]), *rest)),
            replace(told, tensors=()),
            *(replace(told, overhead_seconds=number) for number in (math.nan, math.inf, -1000.0)),
            replace(told, calibration=math.nan),
            replace(told, batch_size=-1),
        ]
        joins = [self._join(one) for one in mad]
        joins += [self._join(told, num_samples=number) for number in (2**62, 0, -1)]
        joins += [self._join(told, model_digest=ODD)]
        async with self._session() as call:
            for join in joins:
                await call.write(join)
            refused = 0
            while refused < len(joins):
                message = await asyncio.wait_for(call.read(), HOLD_SECONDS)
                refused += message.HasField("refused")

    async def member(self) -> None:
        """Join like anybody, said to be a thousand times faster than possible; then lie about each task."""
        if not self._joins:
            return
        async with self._session() as call:
            await call.write(self._join(profile(1e-3, self._spec), can_evaluate=False))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._lie(call), HOLD_SECONDS)

    async def _lie(self, call: Any) -> None:
        async for message in call:
            if message.HasField("task"):
                self._round = message.task.round_num
                self.times["task"] += 1
                # Every other time it keeps the round waiting until its deadline.
                for told in self._results() if self.times["task"] % 2 else ():
                    await call.write(told)
            if message.HasField("closed"):
                late = self._done(message.closed.round_num)
                await call.write(pb.SessionRequest(done=late))

    def _done(self, round_num: int, **fields: Any) -> pb.TaskDone:
        report = report_to_pb(Report(NAME, round_num, 100, 1, 1.0, 0.5))
        return pb.TaskDone(run=self._run, report=report, **fields)

    def _results(self) -> list[pb.SessionRequest]:
        """False results of the open round, and last the claim that an update is there."""
        number, key = self._round, {"run": self._run, "round_num": self._round}
        false = [
            self._done(number, bytes_up=-5),
            self._done(number, bytes_down=2**62),
            self._done(number, phases=pb.PhaseSeconds(train=math.nan)),
            self._done(number, device=pb.DeviceState(energy_joules=-1.0, power_watts=math.inf)),
            self._done(number + 7),
            self._done(-1),
        ]
        for name, value in (("loss_square", -1.0), ("effective_steps", 1e300), ("train_seconds", 1e308)):
            done = self._done(number)
            setattr(done.report, name, value)
            false.append(done)
        foreign = self._done(number)
        foreign.report.client = OTHER
        window = task_pb2.WindowState(end_block=9, front_block=-1, resets=-5)
        progress = pb.TaskProgress(phase="train", window=window, **key)
        return [
            pb.SessionRequest(progress=pb.TaskProgress(phase=ODD, **key)),
            pb.SessionRequest(progress=progress),
            *(pb.SessionRequest(done=done) for done in [*false, foreign]),
            pb.SessionRequest(answer=pb.TaskAnswer(accepted=True, **key)),
            pb.SessionRequest(failed=pb.TaskFailed(message=LONG, **key)),
            pb.SessionRequest(done=self._done(number)),
        ]

    async def unknown_runs(self) -> None:
        async with self._session() as call:
            for number in range(10):
                await call.write(pb.SessionRequest(answer=pb.TaskAnswer(run=LONG[number:], reason=ODD)))
                await call.read()

    async def odd_hellos(self) -> None:
        device = pb.DeviceFacts(device_type="[/red]", memory_bytes=-(2**62))
        hellos = [
            pb.Hello(client=OTHER),
            pb.Hello(client=LONG),
            pb.Hello(),
            pb.Hello(client=NAME, device=device),
            pb.Hello(client=NAME, device=pb.DeviceFacts(device_type=ODD)),
            pb.Hello(client=NAME, device=pb.DeviceFacts(agent_version=LONG)),
        ]
        for first in (*(pb.SessionRequest(hello=hello) for hello in hellos), pb.SessionRequest()):
            call = self._sessions.Session()
            await call.write(first)
            await self._answer("hello", self._read_on(call))

    async def _read_on(self, call: Any) -> None:
        """Until the server ends it, which must be soon."""
        try:
            with suppress(asyncio.TimeoutError):
                async with asyncio.timeout(HOLD_SECONDS):
                    while await call.read() is not aio.EOF:
                        pass
        finally:
            call.cancel()

    async def evaluations(self) -> None:
        async with self._session() as call:
            for version in range(self._round + 3):
                for accuracy in (7.0, math.nan, 1.0):
                    tested = pb.EvaluationDone(run=self._run, model_version=version, accuracy=accuracy)
                    await call.write(pb.SessionRequest(evaluation=tested))
            await call.write(pb.SessionRequest(failed=pb.TaskFailed(run=self._run, round_num=-1, message=ODD)))

    async def flood(self) -> None:
        async with self._session() as call:
            for _ in range(700):
                await call.write(pb.SessionRequest(heartbeat=pb.Heartbeat()))
            while await call.read() is not aio.EOF:
                pass

    async def unread(self) -> None:
        """Messages whose answers it never reads."""
        async with self._session() as call:
            for number in range(200):
                await call.write(pb.SessionRequest(answer=pb.TaskAnswer(run=f"{number}{LONG[:1000]}")))

    # Uploads and downloads

    def _update(self, value: float, partial: bool = False) -> Payload:
        """A finite update, or one that is not; ``partial`` covers a part of each tensor."""
        patches = {}
        for name, old in initial_model(self._spec).items():
            where = tuple(slice(0, max(1, side // 2)) for side in old.shape) if partial else None
            old = old if where is None else old[where]
            patches[name] = Patch(np.full(old.shape, value, np.float32), where)
        return pack(patches)

    def _header(self, payload: Payload, **changes: Any) -> agg.UpdateHeader:
        report = report_to_pb(Report(NAME, self._round, 100, 1, 1.0, 0.5))
        header = agg.UpdateHeader(run=self._run, report=report, tensors=payload.manifest, digest=payload.digest)
        for name, value in changes.items():
            setattr(header if name in ("run", "digest") else header.report, name, value)
        return header

    async def uploads(self) -> None:
        """None of them may count: each is of no task, in another's name, or of what no training gives."""
        self._round = (await fetch_model(self._bulk, self._run)).version
        sound, halves = self._update(1.0), self._update(math.nan, partial=True)
        wide = self._header(sound)
        wide.report.window.selected.append("x" * 4_000_000)
        twice = self._header(sound)
        twice.tensors.append(twice.tensors[0])
        tries = [
            ("name", self._header(sound, client=OTHER), sound),
            ("name", self._header(sound, client=LONG), sound),
            ("run", self._header(sound, run="y" * 3_000_000), sound),
            ("run", self._header(sound, run="../../" + ODD), sound),
            ("ended", self._header(sound, run=self._ended_run, round_num=3), sound),
            ("round", self._header(sound, round_num=self._round + 5), sound),
            ("round", self._header(sound, round_num=-1), sound),
            ("weight", self._header(halves, num_samples=2**62), halves),
            ("steps", self._header(sound, effective_steps=1e300), sound),
            ("steps", self._header(sound, effective_steps=math.nan, num_steps=2**31 - 1), sound),
            ("loss", self._header(sound, loss_square=-1.0), sound),
            ("selected", wide, sound),
            ("manifest", twice, sound),
            ("digest", self._header(sound, digest="0" * 64), sound),
            *(("values", self._header(bad), bad) for bad in map(self._update, (math.nan, math.inf, 3e38))),
        ]
        if not self._joins:
            tries.append(("task", self._header(sound, num_samples=2**40), sound))
        for what, header, payload in tries:
            await self._answer(f"upload of a wrong {what}", self._upload(header, payload, what))

    async def _upload(self, header: agg.UpdateHeader, payload: Payload, what: str) -> None:
        call = self._bulk.PutUpdate()
        try:
            async with asyncio.timeout(10 * HOLD_SECONDS):
                await call.write(agg.PutUpdateRequest(header=header))
                answer = await call.read()
                if answer is not aio.EOF and answer.HasField("permit"):
                    for chunk in payload.chunks(answer.permit.offset):
                        await call.write(agg.PutUpdateRequest(chunk=chunk))
                    await call.done_writing()
                    answer = await call.read()
                if answer is not aio.EOF and answer.HasField("receipt"):
                    self.receipts.append(what)
        finally:
            call.cancel()

    async def held_permit(self) -> None:
        """Ask for a permit, and send one byte of many."""
        payload = self._update(1.0)
        call = self._bulk.PutUpdate()
        try:
            await call.write(agg.PutUpdateRequest(header=self._header(payload)))
            answer = await call.read()
            if answer is not aio.EOF:
                chunk = next(iter(payload.chunks(answer.permit.offset)))
                chunk.data = chunk.data[:1]
                await call.write(agg.PutUpdateRequest(chunk=chunk))
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(call.read(), HOLD_SECONDS)
        finally:
            call.cancel()

    async def unread_downloads(self) -> None:
        request = agg.GetModelRequest(run=self._run, version=-1, have_version=-1)
        calls = [self._bulk.GetModel(request) for _ in range(MANY)]
        calls.append(
            self._bulk.GetModel(agg.GetModelRequest(run=self._run, version=2**31 - 1, have_version=-5))
        )
        try:
            await asyncio.sleep(HOLD_SECONDS)
        finally:
            for call in calls:
                call.cancel()

    async def silent_streams(self) -> None:
        calls: list[Any] = [self._bulk.PutUpdate() for _ in range(MANY)]
        calls += [self._sessions.Session() for _ in range(MANY)]
        try:
            await asyncio.sleep(HOLD_SECONDS)
        finally:
            for call in calls:
                call.cancel()

    # Bytes and calls

    async def _raw(self, channel: aio.Channel, method: str, *messages: bytes) -> None:
        call = channel.stream_stream(method)()
        try:
            async with asyncio.timeout(10 * HOLD_SECONDS):
                for message in messages:
                    await call.write(message)
                await call.done_writing()
                while await call.read() is not aio.EOF:
                    pass
        finally:
            call.cancel()

    async def endless_varint(self) -> None:
        await self._raw(
            self._aggregator, "/fedel.v1.AggregatorService/PutUpdate", b"\x12" + b"\xff" * 4_000_000
        )

    async def garbage(self) -> None:
        noise = np.random.default_rng(self.times["garbage"])
        for service, method in (
            ("Aggregator", "PutUpdate"),
            ("Aggregator", "GetModel"),
            ("Coordinator", "Session"),
        ):
            channel = self._aggregator if service == "Aggregator" else self._coordinator
            call = self._raw(
                channel, f"/fedel.v1.{service}Service/{method}", noise.bytes(300), noise.bytes(300)
            )
            await self._answer(f"garbage to {method}", call)

    async def forbidden_calls(self) -> None:
        for method, roles in RULES.items():
            if AGENT not in roles:
                channel = self._aggregator if "Aggregator" in method else self._coordinator
                await self._answer("forbidden call", self._raw(channel, method, b""))

    async def renewals(self) -> None:
        request = enrolment_pb2.RenewRequest(signing_request=x.new_request(ensure_key(self._tls.folder)))
        stub = EnrolmentServiceStub(self._coordinator)
        for _ in range(MANY):
            await self._answer("renewal", stub.Renew(request))
