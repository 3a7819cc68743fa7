"""No client takes the shares of others: permits, downloads, slow streams, ended runs, long names, disk."""

import asyncio
from contextlib import suppress

import pytest
from fedel_aggregator import limits
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.limits import Shares
from fedel_aggregator.server import serve
from grpc import aio

from fedel.v1 import aggregator_pb2 as pb
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.model_pb2 import Chunk
from fedel.wire.channel import connect
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model
from tests.services.aggregator.support import (
    aggregator,
    asynchronous,
    begin,
    bits,
    close,
    create,
    first_model,
    fold_directly,
    header_of,
    make_update,
    open_round,
    refusal,
    refusals,
    send,
)


def named(update, run):
    """The first message of an upload to a run."""
    return pb.PutUpdateRequest(header=header_of(update, run))


@asynchronous
async def test_one_permit_per_client_over_all_runs(tmp_path):
    async with aggregator(tmp_path, max_uploads=2) as (stub, servicer):
        for run in ("one", "two", "three"):
            await create(stub, run=run)
        calls = []
        for run in ("one", "two", "three"):
            call = stub.PutUpdate()
            await call.write(named(make_update("a"), run))
            calls.append(call)
        await calls[0].read()
        # The other two wait for the first of their client, so there is a permit for somebody else.
        pushed = await send(stub, make_update("b"), run="one")
        assert not pushed.duplicate
        calls[0].cancel()
        assert (await calls[1].read()).HasField("permit")
        calls[1].cancel()
        assert (await calls[2].read()).HasField("permit")
        calls[2].cancel()
        while servicer._permits.num_sending or servicer._permits.num_waiting:
            await asyncio.sleep(0)


@asynchronous
async def test_unread_downloads_of_one_client(tmp_path):
    model = first_model()
    config = AggregatorConfig(listen="127.0.0.1:0", data_dir=tmp_path, max_downloads=3)
    async with serve(config) as (address, _), connect(address) as own:
        stub = AggregatorServiceStub(own)
        await create(stub, model)
        request = pb.GetModelRequest(run="run", version=-1, have_version=-1)
        unread = [stub.GetModel(request) for _ in range(6)]
        await asyncio.gather(*(call.read() for call in unread[:2]))
        # Another connection is another client, where there are no certificates.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with aio.insecure_channel(address, options=options) as channel:
            fetched = await fetch_model(AggregatorServiceStub(channel), "run")
        assert bits(model) == bits(fetched.tensors)
        for call in unread:
            call.cancel()


async def rest_of(call):
    while await call.read() is not aio.EOF:
        pass


@asynchronous
async def test_download_that_nobody_reads_ends(tmp_path):
    config = AggregatorConfig(listen="127.0.0.1:0", data_dir=tmp_path, max_downloads=1, idle_seconds=0.2)
    async with serve(config) as (address, _), connect(address) as own:
        stub = AggregatorServiceStub(own)
        await create(stub)
        call = stub.GetModel(pb.GetModelRequest(run="run", version=-1, have_version=-1))
        await call.read()
        # Its place is free for others, who have another connection, before it takes note of its end.
        async with aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            assert 0 == (await fetch_model(AggregatorServiceStub(channel), "run")).version
        assert ("DEADLINE_EXCEEDED", "idle") == await refusal(rest_of(call))


@asynchronous
async def test_upload_that_drips_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "RATE_SECONDS", 0.3)
    update = make_update("a", names={"two.weight"})
    async with aggregator(tmp_path, min_bytes_per_second=1_000, max_uploads=1) as (stub, servicer):
        await create(stub)
        call = stub.PutUpdate()
        await call.write(pb.PutUpdateRequest(header=header_of(update)))
        await call.read()
        data, sent = bytes(pack(update.patches).buffers[0]), 0
        ended = asyncio.ensure_future(call.read())
        while not ended.done():
            # The stream may end during a write.
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(pb.PutUpdateRequest(chunk=Chunk(offset=sent, data=data[sent : sent + 1])))
            sent += 1
            await asyncio.wait({ended}, timeout=0.02)
        assert ("DEADLINE_EXCEEDED", "slow") == await refusal(ended)
        assert {"slow": 1} == refusals(servicer)
        # The update goes on where it broke.
        assert 0 < pack(update.patches).num_bytes - (await send(stub, update)).num_bytes <= sent


@asynchronous
async def test_ended_run(tmp_path):
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        await send(stub, make_update("a"))
        await close(stub, 0)
        await send(stub, make_update("a", 1))
        under_way = await begin(stub, make_update("b", 1), 10**9)
        for _ in range(2):
            await stub.EndRun(pb.EndRunRequest(run="run"))
        await under_way.done_writing()
        assert ("FAILED_PRECONDITION", "ended") == await refusal(under_way.read())
        assert ("FAILED_PRECONDITION", "ended") == await refusal(send(stub, make_update("c", 1)))
        assert (await send(stub, make_update("a", 1))).duplicate, "a receipt that was lost is given again"
        assert {"ended": 2} == refusals(servicer)
        assert [] == list(tmp_path.rglob("*.part"))
        assert ("NOT_FOUND", "unknown_run") == await refusal(stub.EndRun(pb.EndRunRequest(run="other")))
    async with aggregator(tmp_path) as (stub, _):
        assert ("FAILED_PRECONDITION", "ended") == await refusal(send(stub, make_update("c", 1)))
        model = (await fetch_model(stub, "run")).tensors
        # A coordinator that goes on with the run opens its round, with what it has.
        await open_round(stub, 1)
        updates = [make_update("a", 1), make_update("c", 1)]
        await send(stub, updates[1])
        await close(stub, 1)
        expected = fold_directly(updates, model).model
        assert bits(expected) == bits((await fetch_model(stub, "run")).tensors)


@pytest.mark.parametrize("name", ["x" * 201, "", "two\nlines", "\x1b[2J", "x" * 3_000_000])
@asynchronous
async def test_names_are_checked_before_anything_else(tmp_path, caplog, name):
    caplog.set_level("WARNING", "fedel_services.errors")
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        calls = [
            send(stub, make_update("a"), run=name),
            send(stub, make_update(name), run="run"),
            create(stub, run=name),
            fetch_model(stub, name),
            stub.EndRun(pb.EndRunRequest(run=name)),
            stub.KeepVersion(pb.KeepVersionRequest(run="run", label=name)),
        ]
        for call in calls:
            assert ("INVALID_ARGUMENT", "header") == await refusal(call)
    lines = [record for record in caplog.records if record.name == "fedel_services.errors"]
    assert 6 == len(lines)
    assert all(len(str(vars(line))) < 3_000 for line in lines)
    assert not any("\x1b" in str(vars(line).values()) for line in lines)


@asynchronous
async def test_unplanned_clients_leave_nothing_on_disk(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for number in range(5):
            assert ("FAILED_PRECONDITION", "unplanned") == await refusal(
                send(stub, make_update(f"evil-{number}"))
            )
        assert [] == list(tmp_path.rglob("*.part"))


@asynchronous
async def test_abandoned_parts_do_not_stay(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, late="next")
        call = await begin(stub, make_update("b"), 500_000)
        call.cancel()
        for number in range(3):
            await send(stub, make_update("a", number))
            await close(stub, number)
            assert (1 if number == 0 else 0) == len(list(tmp_path.rglob("*.part"))), number


@asynchronous
async def test_unknown_fields_are_not_kept(tmp_path):
    header = header_of(make_update("a", names=()))
    more = pb.UpdateHeader.FromString(header.SerializeToString() + b"\xfa\x07\x80\x80\x80\x01" + bytes(2 << 20))
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        call = stub.PutUpdate()
        await call.write(pb.PutUpdateRequest(header=more))
        await call.read()
        await call.done_writing()
        assert not (await call.read()).receipt.duplicate
    [path] = tmp_path.rglob("*.update")
    assert path.stat().st_size <= 4096  # one page: its header, and nothing behind it


@asynchronous
async def test_only_its_own_user_can_read_the_data(tmp_path):
    folder = tmp_path / "data"
    async with aggregator(folder) as (stub, _):
        await create(stub, strategy={"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": 4}, keep_every=1)
        for number in range(2):
            await send(stub, make_update("a", number))
            await close(stub, number)
        await stub.KeepVersion(pb.KeepVersionRequest(run="run", version=1, label="best"))
        await send(stub, make_update("a", 2))
        await begin(stub, make_update("b", 2), 100)
        modes = {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert {0o700} == {mode for path, mode in modes.items() if path.is_dir()}
    assert {} == {path: oct(mode) for path, mode in modes.items() if path.is_file() and mode != 0o600}


@asynchronous
async def test_shares_are_fair_and_leave_nothing():
    shares = Shares(2, per_client=1)
    await shares.acquire("a")
    waiting = asyncio.ensure_future(shares.acquire("a"))
    given_up = asyncio.ensure_future(shares.acquire("a"))
    await asyncio.sleep(0)
    given_up.cancel()
    await shares.acquire("b")
    third = asyncio.ensure_future(shares.acquire("c"))
    await asyncio.sleep(0)
    assert (False, False) == (waiting.done(), third.done())
    shares.release("a")
    await third
    shares.release("b")
    await waiting
    shares.release("a")
    shares.release("c")
    await asyncio.wait({given_up})
    assert ({}, {}) == (shares._own, shares._num_users)
