"""Uploads on their way in: permits, resuming, and bytes that are not what was announced."""

import asyncio
import functools
import hashlib
import threading

from fedel_aggregator import streams

from fedel.v1 import aggregator_pb2 as pb
from fedel.v1.model_pb2 import Chunk
from fedel.wire import payload as wire_payload
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model, push_update
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
    metric,
    open_round,
    refusal,
    refusals,
    seal,
    send,
)


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


async def raw(stub, header, chunks):
    """An upload by hand, to the receipt."""
    call = stub.PutUpdate()
    await call.write(pb.PutUpdateRequest(header=header))
    await call.read()
    for offset, data in chunks:
        await call.write(pb.PutUpdateRequest(chunk=Chunk(offset=offset, data=data)))
    await call.done_writing()
    return await call.read()


@asynchronous
async def test_manifest_is_checked_once_in_a_thread(tmp_path, monkeypatch):
    update = make_update("a", names={"three.weight"})
    header, data = header_of(update), bytes(pack(update.patches).buffers[0])
    calls = []
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for name in ("digest", "check"):

            def counted(*arguments, work):
                calls.append((work.__name__, threading.current_thread() is threading.main_thread()))
                return work(*arguments)

            work = getattr(wire_payload, name)
            monkeypatch.setattr(wire_payload, name, functools.partial(counted, work=work))
        assert not (await raw(stub, header, [(0, data)])).receipt.duplicate
    assert [("check", False), ("digest", False)] == sorted(calls)


@asynchronous
async def test_wrong_bytes(tmp_path):
    update = make_update("a", names={"three.weight"})
    payload = pack(update.patches)
    data, header = bytes(payload.buffers[0]), header_of(update)
    wrong = {
        "gap": [(0, data[:8]), (12, data[12:])],
        "out of order": [(8, data[8:]), (0, data[:8])],
        "twice": [(0, data), (0, data)],
        "too many": [(0, data + b"1234")],
        "more after the end": [(0, data), (44, b"1234")],
        "too few": [(0, data[:40])],
        "empty piece": [(0, b"")],
    }
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        for chunks in wrong.values():
            (tmp_path / "runs/run/rounds/000000/a.part").unlink(missing_ok=True)
            assert ("INVALID_ARGUMENT", "size") == await refusal(raw(stub, header, chunks))
        assert {"size": len(wrong)} == refusals(servicer)
        (tmp_path / "runs/run/rounds/000000/a.part").unlink()
        damaged = data[:8] + b"\0\0\0\0" + data[12:]
        assert ("DATA_LOSS", "checksum") == await refusal(raw(stub, header, [(0, damaged)]))
        header.digest = "0" * 64
        assert ("INVALID_ARGUMENT", "digest") == await refusal(raw(stub, header, []))
        header.report.client = ""
        assert ("INVALID_ARGUMENT", "header") == await refusal(raw(stub, header, []))
        no_header = stub.PutUpdate()
        await no_header.done_writing()
        assert ("INVALID_ARGUMENT", "header") == await refusal(no_header.read())
        # After damage on the way the same update is taken from its first byte.
        assert len(data) == (await send(stub, update)).num_bytes


@asynchronous
async def test_resume_after_a_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BATCH_BYTES", 1)
    update = make_update("a")
    payload = pack(update.patches)
    half = payload.num_bytes // 2
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        call = await begin(stub, update, half)
        path = tmp_path / "runs/run/rounds/000000/a.part"
        await until(lambda: path.exists() and path.stat().st_size > half)
        call.cancel()
        pushed = await push_update(stub, "run", update.report, payload)
        assert payload.num_bytes - half == pushed.num_bytes
        assert payload.num_bytes == metric(servicer, "fedel_upload_bytes_total"), "no byte came twice"
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    assert bits(fold_directly([update], first_model()).model) == bits(model)


@asynchronous
async def test_new_stream_supersedes_the_old(tmp_path):
    update = make_update("a")
    async with aggregator(tmp_path, max_uploads=1) as (stub, _):
        await create(stub)
        dead = await begin(stub, update, 100)
        pushed = await send(stub, update)
        assert not pushed.duplicate
        assert ("ABORTED", "superseded") == await refusal(dead.read())


@asynchronous
async def test_max_uploads(tmp_path):
    async with aggregator(tmp_path, max_uploads=2) as (stub, servicer):
        await create(stub)
        sending = [await begin(stub, make_update(client), 10) for client in "ab"]
        waiting = [asyncio.create_task(send(stub, make_update(client))) for client in "cdef"]
        await asyncio.wait(waiting, timeout=0.3)
        assert [False] * 4 == [task.done() for task in waiting]
        sending[0].cancel()
        pushed = await asyncio.gather(*waiting)
        assert [False] * 4 == [p.duplicate for p in pushed]
        assert min(p.wait_seconds for p in pushed) > 0.25
        sending[1].cancel()
        assert ["c", "d", "e", "f"] == [r.client for r in await seal(stub, 0)]
        await until(lambda: servicer._permits.num_sending == 0)


@asynchronous
async def test_idle_stream(tmp_path):
    update = make_update("a")
    async with aggregator(tmp_path, idle_seconds=0.1) as (stub, _):
        await create(stub)
        call = await begin(stub, update, 100)
        assert ("DEADLINE_EXCEEDED", "idle") == await refusal(call.read())
        assert pack(update.patches).num_bytes - 100 == (await send(stub, update)).num_bytes
        silent = stub.PutUpdate()
        assert ("DEADLINE_EXCEEDED", "idle") == await refusal(silent.read())


@asynchronous
async def test_strange_client_names(tmp_path):
    names = ["../../evil", ".", "..", "a/b", "x" * 200, "käse"]
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await open_round(stub, 0, clients=names)
        for name in names:
            await send(stub, make_update(name, names={"three.weight"}))
        sealed = await seal(stub, 0)
        assert sorted(names) == [report.client for report in sealed]
        assert len(names) == len(list((tmp_path / "runs/run/rounds/000000").glob("*.update")))


@asynchronous
async def test_update_under_an_old_file_name(tmp_path):
    """Clients with long names once had other file names; their acknowledged updates count all the same."""
    update = make_update("x" * 190)
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await open_round(stub, 0, clients=["x" * 190])
        await send(stub, update)
    [path] = (tmp_path / "runs/run/rounds/000000").glob("*.update")
    path.rename(path.with_name(hashlib.sha256(b"x" * 190).hexdigest() + ".update"))
    async with aggregator(tmp_path) as (stub, _):
        assert (await send(stub, update)).duplicate
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    assert bits(fold_directly([update], first_model()).model) == bits(model)
