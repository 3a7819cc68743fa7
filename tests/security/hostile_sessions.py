"""Attacks on the coordinator, in sessions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from grpc import aio

from fedel.types import Report, TimingProfile
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import task_pb2
from fedel.wire.codec import profile_to_pb, report_to_pb
from fedel.wire.protocol import PROTOCOL
from tests.security.attacker import ANSWER_SECONDS, HOLD_SECONDS, LONG, NAME, ODD, OTHER, Attacker
from tests.strategies.fakes import profile


class SessionAttacks(Attacker):
    @asynccontextmanager
    async def _session(self, device_type: str = "fake") -> AsyncIterator[Any]:
        call = self._sessions.Session()
        try:
            device = pb.DeviceFacts(device_type=device_type)
            await call.write(pb.SessionRequest(hello=pb.Hello(client=NAME, device=device, protocol=PROTOCOL)))
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
                message = await asyncio.wait_for(call.read(), ANSWER_SECONDS)
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
            pb.Hello(client=NAME, protocol=-5),
            pb.Hello(client=NAME, protocol=2**31 - 1),
            pb.Hello(client=NAME, protocol=PROTOCOL, labels={ODD: LONG}),
            pb.Hello(client=NAME, protocol=PROTOCOL, labels={str(n): "x" for n in range(10_000)}),
        ]
        for first in (*(pb.SessionRequest(hello=hello) for hello in hellos), pb.SessionRequest()):
            call = self._sessions.Session()
            await call.write(first)
            await self._answer("hello", self._read_on(call))

    async def _read_on(self, call: Any) -> None:
        """Until the server ends it, which must be soon."""

        async def read() -> None:
            while await call.read() is not aio.EOF:
                pass

        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(read(), HOLD_SECONDS)
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
        """Until the server ends it: it counts by the second, so no number is enough on every machine."""
        async with self._session() as call:
            while True:
                await call.write(pb.SessionRequest(heartbeat=pb.Heartbeat()))

    async def unread(self) -> None:
        """Messages whose answers it never reads."""
        async with self._session() as call:
            for number in range(200):
                await call.write(pb.SessionRequest(answer=pb.TaskAnswer(run=f"{number}{LONG[:1000]}")))
