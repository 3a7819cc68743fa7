"""Errors of the system that pass: callers are told to try again, and nothing is half done."""

import asyncio
import errno
import os

import numpy as np
import pytest
from fedel_aggregator import journal, private_files, run, streams, versions
from grpc import aio

import fedel.files
from fedel.strategies.base import MeanFold
from fedel.types import Patch
from fedel.v1 import aggregator_pb2 as pb
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model, reason_of
from tests.services.aggregator.support import (
    aggregator,
    asynchronous,
    begin,
    bits,
    close,
    create,
    first_model,
    fold_directly,
    make_update,
    open_round,
    refusal,
    seal,
    send,
)


class Failing:
    """Replaces a function; raises as long as ``error`` is set, before or after the work."""

    def __init__(self, monkeypatch, owner, name, after=False):
        self.error, self.calls, self._after = None, 0, after
        self._work = getattr(owner, name)
        replaced = self

        def failing(*arguments, **options):
            return replaced(*arguments, **options)

        monkeypatch.setattr(owner, name, failing)

    def __call__(self, *arguments, **options):
        result = self._work(*arguments, **options) if self._after or not self.error else None
        if self.error:
            self.calls += 1
            raise self.error
        return result


PLACES = {
    "seal": (journal.Journal, "seal"),
    "open a folder": (fedel.files, "sync_directory"),
    "write a file": (private_files, "write_atomic"),
    "new version": (versions, "open_atomic"),
    "old version": (versions, "TensorFile"),
    "publish": (versions.Versions, "publish"),
    "next round": (run, "Journal"),
    "retire": (journal.Journal, "retire"),
    "delete": (versions.Versions, "delete"),
}


async def outcome(call):
    """Status and reason of a call that may fail because of ``some.file``."""
    try:
        await call
    except aio.AioRpcError as error:
        text = error.details()
        return (error.code().name, reason_of(error)) if "'some.file': Too many open files" in text else text
    return None


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
@asynchronous
async def test_round_closes_once_the_error_has_passed(tmp_path, monkeypatch, place, after):
    updates = {n: [make_update(client, n) for client in "ab"] for n in range(3)}
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        model = first_model()
        for number in range(3):
            for update in updates[number]:
                await send(stub, update)
            if number == 2:
                failing = Failing(monkeypatch, *PLACES[place], after=after)
                failing.error = OSError(errno.EMFILE, "Too many open files", "some.file")
                outcomes = [await outcome(close(stub, number)) for _ in range(2)]
                assert ("UNAVAILABLE", "io") == outcomes[0]
                # What fails after the new version exists is not done again.
                assert outcomes[1] in (None, outcomes[0])
                failing.error = None
                assert failing.calls
            answer = await stub.CommitRound(
                pb.CommitRoundRequest(run="run", round_num=number, clients=["a", "b"])
            )
            assert (number + 1, {2}) == (answer.version, set(answer.num_clients))
            assert ["a", "b"] == [report.client for report in await seal(stub, number)]
            await open_round(stub, number + 1)
            model = fold_directly(updates[number], model).model
        assert bits(model) == bits((await fetch_model(stub, "run")).tensors)
    async with aggregator(tmp_path) as (stub, _):
        assert bits(model) == bits((await fetch_model(stub, "run")).tensors)
        await send(stub, make_update("a", 3))
        assert 4 == (await close(stub, 3)).version


@pytest.mark.parametrize(
    "place", [(journal, "open_private"), (journal, "sync_directory"), (os, "fsync"), (os, "fdatasync")]
)
@asynchronous
async def test_upload_that_met_an_error_is_resumed(tmp_path, monkeypatch, place):
    update = make_update("a")
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        failing = Failing(monkeypatch, *place)
        failing.error = OSError(errno.EMFILE, "Too many open files")
        assert ("UNAVAILABLE", "io") == await refusal(send(stub, update))
        assert [] == await seal_and_open(stub, failing)
        pushed = await send(stub, update)
        assert not pushed.duplicate
        assert pushed.num_bytes == (pack(update.patches).num_bytes if place[1] == "open_private" else 0)
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    assert bits(fold_directly([update], first_model()).model) == bits(model)


async def seal_and_open(stub, failing):
    """What counts after the error; the round is open again afterwards."""
    failing.error = None
    reports = await seal(stub, 0)
    await open_round(stub, 0)
    return reports


@asynchronous
async def test_lost_permission(tmp_path, monkeypatch):
    """What a folder that nobody may write to gives: the file and the cause."""
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        failing = Failing(monkeypatch, os, "open")
        failing.error = PermissionError(errno.EACCES, "Permission denied", "rounds/000000/a.part")
        with pytest.raises(aio.AioRpcError) as caught:
            await send(stub, make_update("a"))
        failing.error = None
        assert "'rounds/000000/a.part': Permission denied" in caught.value.details()
        assert not (await send(stub, make_update("a"))).duplicate


class BadFold(MeanFold):
    """Folds half of an update whose first value is 666, and then fails."""

    error: BaseException = OverflowError("Python integer too large")

    def add(self, update):
        if update.patches["one.weight"].values.flat[0] == 666:
            super().add(type(update)({"one.weight": update.patches["one.weight"]}, update.report))
            raise self.error
        super().add(update)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverflowError("too large"), ("INTERNAL", "internal")),
        (MemoryError(), ("RESOURCE_EXHAUSTED", "memory")),
        (OSError(errno.EIO, "Input/output error"), ("UNAVAILABLE", "io")),
    ],
    ids=["overflow", "memory", "io"],
)
@asynchronous
async def test_update_that_fails_in_the_fold_leaves_no_trace(tmp_path, monkeypatch, error, status):
    monkeypatch.setattr("fedel.strategies.fedavg.MeanFold", BadFold)
    monkeypatch.setattr(BadFold, "error", error)
    evil, honest = make_update("a"), [make_update("b"), make_update("c")]
    evil.patches["one.weight"].values.flat[0] = 666
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, honest[0])
        assert status == await refusal(send(stub, evil))
        await send(stub, honest[1])
        assert ["b", "c"] == [report.client for report in await seal(stub, 0)]
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    assert bits(fold_directly(honest, first_model()).model) == bits(model)


@asynchronous
async def test_updates_that_the_fold_refuses_again_and_again(tmp_path):
    """Each of them makes the fold to be made again, so there is a limit."""
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for seed in range(run.MAX_REFUSED):
            update = make_update("a", seed=seed)
            update.patches["one.mean"].values[0] = np.nan
            assert ("INVALID_ARGUMENT", "not_finite") == await refusal(send(stub, update))
        assert ("ALREADY_EXISTS", "conflict") == await refusal(send(stub, make_update("a", seed=9)))
        assert not (await send(stub, make_update("b"))).duplicate


class Overflowing(MeanFold):
    """A fold whose result is not finite."""

    def finish(self, model, state):
        folded = super().finish(model, state)
        if "two.exit" in folded.model:
            folded.model["two.exit"][2, 2] = self.value
        return folded


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@asynchronous
async def test_no_version_that_is_not_finite(tmp_path, monkeypatch, value):
    monkeypatch.setattr("fedel.strategies.fedavg.MeanFold", Overflowing)
    monkeypatch.setattr(Overflowing, "value", value, raising=False)
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, make_update("a"))
        with pytest.raises(aio.AioRpcError, match=r"tensor 'two\.exit'") as caught:
            await close(stub, 0)
        assert ("FAILED_PRECONDITION", "not_finite") == (caught.value.code().name, reason_of(caught.value))
        fetched = await fetch_model(stub, "run")
        assert (0, bits(first_model())) == (fetched.version, bits(fetched.tensors))
        assert ("UNAVAILABLE", "sealed") == await refusal(send(stub, make_update("b")))
        monkeypatch.setattr(Overflowing, "finish", MeanFold.finish)
        assert 1 == (await close(stub, 0)).version


@asynchronous
async def test_power_cut_in_an_upload(tmp_path, monkeypatch):
    """Bytes that were written but never reached the disk: the client starts again at the first."""
    update = make_update("a")
    size = pack(update.patches).num_bytes
    path = tmp_path / "runs/run/rounds/000000/a.part"
    monkeypatch.setattr(streams, "BATCH_BYTES", 1)
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        call = await begin(stub, update, size // 2)
        while not (path.exists() and path.stat().st_size > size // 2):
            await asyncio.sleep(0)
        call.cancel()
    data = bytearray(path.read_bytes())
    data[-4096:] = bytes(4096)
    path.write_bytes(data)
    async with aggregator(tmp_path) as (stub, _):
        assert ("DATA_LOSS", "checksum") == await refusal(send(stub, update))
        assert size == (await send(stub, update)).num_bytes


@asynchronous
async def test_partial_update_of_absurd_weight(tmp_path):
    """A weight that the sums cannot hold is refused, or counted exactly; it never stays in half."""
    evil = make_update("a", names=())
    evil.patches["one.weight"] = Patch(np.full((2, 2), 1e-3, np.float32), (slice(0, 2), slice(0, 2)))
    honest = make_update("b")
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        absurd = pb.Participant(
            client="a", round_num=0, num_samples=2**40, max_steps=10, max_effective_steps=100
        )
        plan = [
            pb.Participant(client="b", round_num=0, num_samples=5, max_steps=10, max_effective_steps=100),
            absurd,
        ]
        await stub.OpenRound(pb.OpenRoundRequest(run="run", round_num=0, participants=plan))
        with pytest.raises(aio.AioRpcError):
            await send(stub, evil)
        await send(stub, honest)
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    honest = make_update("b", num_samples=5)
    assert bits(fold_directly([honest], first_model()).model) == bits(model)
