"""Clients that fetch a model at the same time share what is read of it."""

import asyncio
import threading

import pytest
from fedel_aggregator import shared_reads
from fedel_aggregator.shared_reads import SharedReads

from fedel.v1 import aggregator_pb2 as pb
from fedel.wire.streams import fetch_model
from tests.services.aggregator.support import (
    aggregator,
    asynchronous,
    bits,
    close,
    create,
    first_model,
    fold_directly,
    make_update,
    send,
)


class Slow:
    """A reading that lasts until it is let go."""

    def __init__(self, messages=(b"piece",), error=None):
        self.began, self.go_on = threading.Event(), threading.Event()
        self._messages, self._error = list(messages), error

    def __call__(self):
        self.began.set()
        assert self.go_on.wait(10)
        if self._error:
            raise self._error
        return self._messages


@asynchronous
async def test_all_that_ask_meanwhile_get_one_reading():
    reads, slow = SharedReads(), Slow()
    asking = [asyncio.create_task(reads.get("key", slow)) for _ in range(5)]
    await asyncio.to_thread(slow.began.wait)
    slow.go_on.set()
    assert [[b"piece"]] * 5 == await asyncio.gather(*asking)
    assert [b"piece"] == await reads.get("key", lambda: [b"other"]), "it is kept for a while"
    assert 1 == reads.num_read


@asynchronous
async def test_others_read_themselves_where_one_failed():
    reads, slow = SharedReads(), Slow(error=OSError(5, "Input/output error"))
    first = asyncio.create_task(reads.get("key", slow))
    await asyncio.to_thread(slow.began.wait)
    others = [asyncio.create_task(reads.get("key", lambda: [b"piece"])) for _ in range(3)]
    await asyncio.sleep(0)
    slow.go_on.set()
    with pytest.raises(OSError, match="Input/output"):
        await first
    assert [[b"piece"]] * 3 == await asyncio.gather(*others)
    assert 2 == reads.num_read


@asynchronous
async def test_others_read_themselves_where_one_hung_up():
    reads, slow = SharedReads(), Slow()
    first = asyncio.create_task(reads.get("key", slow))
    await asyncio.to_thread(slow.began.wait)
    other = asyncio.create_task(reads.get("key", lambda: [b"mine"]))
    await asyncio.sleep(0)
    first.cancel()
    slow.go_on.set()
    assert [b"mine"] == await other
    assert first.cancelled()


@asynchronous
async def test_only_the_last_readings_are_kept():
    reads = SharedReads()
    for key in range(shared_reads.NUM_KEPT + 1):
        await reads.get(key, lambda: [b"old"])
    assert [b"new"] == await reads.get(0, lambda: [b"new"])
    assert [b"old"] == await reads.get(shared_reads.NUM_KEPT, lambda: [b"new"])


@asynchronous
async def test_a_model_is_read_once_for_all(tmp_path):
    model = first_model()
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub, model)
        for fetched in await asyncio.gather(*(fetch_model(stub, "run") for _ in range(4))):
            assert bits(model) == bits(fetched.tensors)
        assert 2 == servicer.reads.num_read, "1.4 MB, and a reading is 1 MiB"


@asynchronous
async def test_another_version_or_run_is_read_anew(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await fetch_model(stub, "run")
        await send(stub, make_update("a"))
        await close(stub, 0)
        changed = await fetch_model(stub, "run")
        expected = fold_directly([make_update("a")], first_model()).model
        assert bits(expected) == bits(changed.tensors)
        assert bits(first_model()) == bits((await fetch_model(stub, "run", version=0)).tensors)
        part = await fetch_model(stub, "run", have_version=0)
        assert bits(changed.tensors) == bits(part.tensors)
        await stub.DeleteRun(pb.DeleteRunRequest(run="run"))
        await create(stub, first_model(seed=1))
        assert bits(first_model(seed=1)) == bits((await fetch_model(stub, "run")).tensors)
