"""kill -9 at every point that matters: what was acknowledged counts exactly once, and the bits are the same."""

import asyncio
import signal
import sys
from contextlib import asynccontextmanager

import pytest
from grpc import aio

from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model
from tests.services.aggregator.support import (
    asynchronous,
    bits,
    close,
    create,
    first_model,
    fold_directly,
    make_update,
    send,
)

# A server in which one function kills the process, as kill -9 would, before or after its work.
DEADLY = """
import os, signal, sys
from fedel_aggregator import __main__ as program, journal, streams, tensor_file, versions
streams.BATCH_BYTES = 1
place, when, countdown = sys.argv[1], sys.argv[2], int(sys.argv[3])
owner, name = {"commit update": (journal.Journal, "commit"), "append": (journal.Part, "append"),
               "seal": (journal.Journal, "seal"), "put tensor": (tensor_file.TensorWriter, "put"),
               "publish": (versions.Versions, "publish"), "retire": (journal.Journal, "retire"),
               "nowhere": (versions.Versions, "all")}[place]
work = getattr(owner, name)

def deadly(*arguments):
    global countdown
    countdown -= place != "nowhere"
    if when == "before" and countdown == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    result = work(*arguments)
    if when == "after" and countdown == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, name, deadly)
sys.exit(program.main(sys.argv[4:]))
"""


@asynccontextmanager
async def process(folder, place="nowhere", when="before", countdown=1):
    """Stub and process of a server; what is left of it is stopped at the end."""
    address = folder / "address"
    address.unlink(missing_ok=True)
    settings = {"listen": "127.0.0.1:0", "data_dir": folder / "data", "port_file": address}
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DEADLY, place, when, str(countdown), *options, stderr=asyncio.subprocess.PIPE
    )
    try:
        while not address.exists():
            line = await server.stderr.readline()
            assert line, "the server ended before it listened"
        async with connect(address.read_text()) as channel:
            yield AggregatorServiceStub(channel), server
    finally:
        if server.returncode is None:
            server.terminate()
        await server.communicate()


@asynccontextmanager
async def that_dies():
    """The call that runs when the server dies fails with an error that clients retry."""
    with pytest.raises(aio.AioRpcError) as caught:
        yield
    assert "UNAVAILABLE" == caught.value.code().name


async def whole_round(stub, updates):
    await create(stub)
    pushed = [await send(stub, update) for update in updates]
    answer = await close(stub, 0)
    return pushed, answer


POINTS = [
    ("append", "before", 2, "in the middle of the first upload"),
    ("append", "after", 5, "in the middle of the second upload"),
    ("commit update", "before", 2, "the second update whole but not yet counted"),
    ("commit update", "after", 2, "the second update counted but not yet acknowledged"),
    ("seal", "before", 1, "before the round is sealed"),
    ("seal", "after", 1, "the round sealed but not yet answered"),
    ("put tensor", "after", 2, "in the middle of the new version"),
    ("publish", "before", 2, "the new version written but not yet counted"),
    ("publish", "after", 2, "the new version counted, its round still there"),
    ("retire", "after", 1, "committed but not yet answered"),
]


@pytest.mark.parametrize(
    ("place", "when", "countdown"),
    [point[:3] for point in POINTS],
    ids=[point[3] for point in POINTS],
)
@asynchronous
async def test_same_bits_after_kill(tmp_path, place, when, countdown):
    updates = [make_update(client) for client in "ab"]
    async with process(tmp_path, place, when, countdown) as (stub, server):
        async with that_dies():
            await whole_round(stub, updates)
        assert -signal.SIGKILL == await server.wait()
    async with process(tmp_path) as (stub, server):
        _, answer = await whole_round(stub, updates)
        assert [2] * 5 == list(answer.num_clients)
        model = (await fetch_model(stub, "run")).tensors
        await send(stub, make_update("a", 1))
        await close(stub, 1)
        last = (await fetch_model(stub, "run")).tensors
        server.terminate()
        assert 0 == await server.wait()
    expected = fold_directly(updates, first_model()).model
    assert bits(expected) == bits(model)
    assert bits(fold_directly([make_update("a", 1)], expected).model) == bits(last)


@asynchronous
async def test_kill_loses_no_received_bytes(tmp_path):
    first, second = make_update("a"), make_update("b")
    size = pack(first.patches).num_bytes
    async with process(tmp_path, "append", "after", 5) as (stub, _):
        await create(stub)
        await send(stub, first)
        async with that_dies():
            await send(stub, second)
    async with process(tmp_path) as (stub, _):
        assert (True, 0) == (lambda pushed: (pushed.duplicate, pushed.num_bytes))(await send(stub, first))
        assert 0 < (await send(stub, second)).num_bytes < size


@asynchronous
async def test_seal_survives_kill(tmp_path):
    async with process(tmp_path, "publish", "before", 2) as (stub, _):
        await create(stub)
        await send(stub, make_update("a"))
        async with that_dies():
            await close(stub, 0)
    async with process(tmp_path) as (stub, _):
        with pytest.raises(aio.AioRpcError, match="is being closed"):
            await send(stub, make_update("b"))


@asynchronous
async def test_damaged_update_counts_as_not_sent(tmp_path):
    async with process(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, make_update("a"))
    path = tmp_path / "data/runs/run/rounds/000000/a.update"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    async with process(tmp_path) as (stub, _):
        assert not (await send(stub, make_update("a"))).duplicate
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    assert bits(fold_directly([make_update("a")], first_model()).model) == bits(model)


@asynchronous
async def test_wrong_setting_gives_a_hint(tmp_path):
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "fedel_aggregator", "--set", "max_upload=3"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, words = await server.communicate()
    assert 2 == server.returncode
    assert "did you mean 'max_uploads'" in words.decode()
