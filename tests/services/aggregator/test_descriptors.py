"""Calls that fail while a file is being opened leave no descriptor behind."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest
from fedel_aggregator import journal, tensor_file
from fedel_aggregator.errors import Damaged

from tests.services.aggregator.support import aggregator, asynchronous, create, make_update, refusal, send


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
