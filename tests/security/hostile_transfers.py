"""Attacks by uploads and downloads, and by bytes and calls of any kind."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Any

import numpy as np
from grpc import aio

from fedel.security import certificates as x
from fedel.security.folder import ensure_key
from fedel.security.identity import AGENT, RULES
from fedel.types import Patch, Report
from fedel.v1 import aggregator_pb2 as agg
from fedel.v1 import enrolment_pb2
from fedel.v1.enrolment_pb2_grpc import EnrolmentServiceStub
from fedel.wire.codec import report_to_pb
from fedel.wire.payload import Payload, pack
from fedel.wire.streams import fetch_model
from tests.security.attacker import ANSWER_SECONDS, HOLD_SECONDS, LONG, MANY, NAME, ODD, OTHER, Attacker
from tests.strategies.fakes import initial_model


class TransferAttacks(Attacker):
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

        async def send() -> None:
            await call.write(agg.PutUpdateRequest(header=header))
            answer = await call.read()
            if answer is not aio.EOF and answer.HasField("permit"):
                for chunk in payload.chunks(answer.permit.offset):
                    await call.write(agg.PutUpdateRequest(chunk=chunk))
                await call.done_writing()
                answer = await call.read()
            if answer is not aio.EOF and answer.HasField("receipt"):
                self.receipts.append(what)

        try:
            await asyncio.wait_for(send(), ANSWER_SECONDS)
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

        async def send() -> None:
            for message in messages:
                await call.write(message)
            await call.done_writing()
            while await call.read() is not aio.EOF:
                pass

        try:
            await asyncio.wait_for(send(), ANSWER_SECONDS)
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
