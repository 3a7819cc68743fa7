"""Calls that fail or are cancelled while a file is being opened leave no descriptor behind."""

import asyncio
import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from fedel_aggregator import journal, tensor_file
from fedel_aggregator.errors import Damaged
from fedel_aggregator.first_model import FirstModel
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.run import ShardRun
from fedel_services.threads import in_thread

from fedel.types import Patch
from fedel.wire.payload import pack
from fedel.wire.streams import model_header
from tests.services.aggregator.support import (
    FEDAVG,
    SPEC,
    aggregator,
    asynchronous,
    create,
    first_model,
    header_of,
    make_update,
    open_round,
    refusal,
    send,
)


def full(*_arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_files(folder):
    """Descriptors of this process on files below a folder."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(link.readlink())
    return [path for path in links if path.is_relative_to(folder) and path.name != "lock"]


@asynchronous
async def test_upload_on_a_full_disk(tmp_path, monkeypatch):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        monkeypatch.setattr(journal, "write_all", full)
        for _ in range(3):
            assert ("RESOURCE_EXHAUSTED", "disk") == await refusal(send(stub, make_update("a")))
        assert [] == open_files(tmp_path)


@asynchronous
async def test_first_model_on_a_full_disk(tmp_path, monkeypatch):
    async with aggregator(tmp_path) as (stub, _):
        monkeypatch.setattr(tensor_file, "write_all", full)
        await refusal(create(stub))
        assert [] == open_files(tmp_path)


def test_damaged_version(tmp_path):
    path = tmp_path / "000000.safetensors"
    path.write_bytes(b"\x08" + b"\0" * 7 + b"not json")
    with pytest.raises(Damaged, match="Expecting value"):
        tensor_file.TensorFile(path)
    assert [] == open_files(tmp_path)


def new_model(folder, _run):
    header = model_header("new", FEDAVG, SPEC)
    header.tensors.extend(pack({name: Patch(values) for name, values in first_model().items()}).manifest)
    return FirstModel(folder / "runs/new", header, RecycledFiles(folder / "r"))


def upload(_folder, run):
    header = header_of(make_update("a"))
    return run.begin(run.examine(header), header)


def download(_folder, run):
    return run.versions.open(0)


@pytest.mark.parametrize("opening", [new_model, upload, download])
@asynchronous
async def test_caller_that_hangs_up(tmp_path, opening):
    """A link that is cut ends a call at any moment, also while a thread opens its file."""
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await open_round(stub, 0, clients="a")
    run = ShardRun(tmp_path / "runs/run", RecycledFiles(tmp_path / "r"))
    began, cut = threading.Event(), threading.Event()

    def work():
        began.set()
        cut.wait()
        return opening(tmp_path, run)

    call = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(began.wait)
    call.cancel()
    await asyncio.sleep(0)
    cut.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [] == open_files(tmp_path)
