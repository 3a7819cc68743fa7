"""Files of closed rounds that later rounds overwrite: their old content never shows."""

import pytest
from fedel_aggregator import recycled_files
from fedel_aggregator.journal import Journal
from fedel_aggregator.recycled_files import RecycledFiles

from fedel.errors import ServiceError
from fedel.roles.aggregator import Content, Upload
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model
from tests.services.aggregator.support import (
    SPEC,
    aggregator,
    asynchronous,
    bits,
    close,
    create,
    first_model,
    fold_directly,
    header_of,
    make_update,
    send,
)


def begin(journal, update):
    header = header_of(update)
    return journal.begin(Upload(header.report.client, Content(header.report.round_num, header.digest)), header)


def put(journal, update, most=None):
    """Bring an update in, or only its first bytes."""
    part = begin(journal, update)
    data = b"".join(bytes(chunk.data) for chunk in pack(update.patches).chunks())
    part.append([data[part.received : most]])
    part.close()
    return part


def closed_round(folder, recycled, names):
    """A round that is over, whose files are recycled."""
    journal = Journal(folder / "rounds/000000", recycled)
    for name in names:
        journal.commit(put(journal, make_update(name)))
    journal.retire()
    return Journal(folder / "rounds/000001", recycled)


def test_recycled_file_holds_only_the_new_update(tmp_path):
    journal = closed_round(tmp_path, RecycledFiles(tmp_path / "spare"), ["a", "b"])
    inodes = {path.stat().st_ino for path in (tmp_path / "spare").iterdir()}
    assert 2 == len(inodes)
    small = make_update("c", names={"three.weight"})
    journal.commit(put(journal, small))
    path = journal.folder / "c.update"
    assert path.stat().st_ino in inodes
    assert 1 == len(list((tmp_path / "spare").iterdir()))
    read = journal.read("c", SPEC)
    assert small.report.client == read.report.client
    assert bits({n: p.values for n, p in small.patches.items()}) == bits(
        {n: p.values for n, p in read.patches.items()}
    )


def test_resume_in_a_recycled_file(tmp_path):
    """The file is as long as the whole update from the start, so its size says nothing."""
    journal = closed_round(tmp_path, RecycledFiles(tmp_path / "spare"), ["a"])
    update = make_update("b")
    put(journal, update, most=40)
    again = begin(journal, update)
    assert 40 == again.received
    again.close()
    other = begin(journal, make_update("b", round_num=1))
    assert 0 == other.received
    other.close()


def test_old_bytes_are_no_update(tmp_path):
    journal = closed_round(tmp_path, RecycledFiles(tmp_path / "spare"), ["a"])
    journal.commit(put(journal, make_update("b"), most=40))
    with pytest.raises(ServiceError, match="damaged"):
        journal.read("b", SPEC)


def test_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(recycled_files, "MAX_FILES", 2)
    pool = RecycledFiles(tmp_path / "spare")
    closed_round(tmp_path, pool, ["a", "b", "c"])
    assert 2 == len(list((tmp_path / "spare").iterdir()))
    monkeypatch.setattr(recycled_files, "MAX_BYTES", 1)
    closed_round(tmp_path / "more", pool, ["a"])
    assert 1 == len(list((tmp_path / "spare").iterdir()))
    for _ in range(2):
        pool.take(tmp_path / "taken")
    assert [] == list((tmp_path / "spare").iterdir())


@asynchronous
async def test_rounds_on_recycled_files(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        model = first_model()
        for round_num in range(3):
            updates = [make_update(name, round_num=round_num) for name in "abc"[round_num:]]
            for update in updates:
                await send(stub, update)
            await close(stub, round_num)
            model = fold_directly(updates, model).model
        assert bits(model) == bits((await fetch_model(stub, "run")).tensors)
    assert 3 == len(list((tmp_path / "spare").iterdir()))
