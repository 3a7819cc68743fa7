"""Where things lie in the file of an update: pages now, and byte after byte in earlier versions."""

import re
from pathlib import Path

import pytest
from fedel_aggregator import stored_patches
from fedel_aggregator.journal import Journal, open_update
from fedel_aggregator.recycled_files import RecycledFiles

from fedel.wire.payload import pack
from tests.services.aggregator.support import SPEC, make_update
from tests.services.aggregator.test_recycled_files import begin, put

PAGE = 4096


def the_payload(update):
    return b"".join(bytes(chunk.data) for chunk in pack(update.patches).chunks())


def of_an_earlier_version(path):
    """Lay a file out as before: the payload behind the header, no mark in its length."""
    data = path.read_bytes()
    length = int.from_bytes(data[:4], "little") - (1 << 31)
    start = -(-(16 + length) // PAGE) * PAGE
    path.write_bytes(length.to_bytes(4, "little") + data[4 : 16 + length] + data[start:])


def test_a_payload_begins_with_a_page(tmp_path):
    journal, update = Journal(tmp_path / "rounds/000000", RecycledFiles(tmp_path / "spare")), make_update("a")
    journal.commit(put(journal, update))
    _, start = open_update(journal.path("a"))
    assert start % PAGE == 0
    data = the_payload(update)
    assert journal.path("a").read_bytes()[start : start + len(data)] == data


@pytest.mark.parametrize("received", [0, 1000, None])
def test_a_file_of_an_earlier_version_goes_on(tmp_path, received):
    recycled = RecycledFiles(tmp_path / "spare")
    journal, update = Journal(tmp_path / "rounds/000000", recycled), make_update("a")
    part = put(journal, update, received)
    of_an_earlier_version(part.path)
    resumed = begin(journal, update)
    data = the_payload(update)
    assert resumed.received == (len(data) if received is None else received)
    resumed.append([data[resumed.received :]])
    resumed.close()
    journal.commit(resumed)
    assert open_update(journal.path("a"))[1] % PAGE  # it was not laid out again
    read = journal.read("a", SPEC)
    assert {n: p.values.tobytes() for n, p in read.patches.items()} == {
        n: p.values.tobytes() for n, p in update.patches.items()
    }


def test_an_update_without_tensors_has_its_page_too(tmp_path):
    journal = Journal(tmp_path / "rounds/000000", RecycledFiles(tmp_path / "spare"))
    part = put(journal, make_update("a", names=()))
    journal.commit(part)
    assert journal.path("a").stat().st_size == open_update(journal.path("a"))[1]
    assert {} == dict(journal.read("a", SPEC).patches)


def test_pages_that_left_memory_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_patches, "MAX_PRESENT", PAGE)
    journal, update = Journal(tmp_path / "rounds/000000", RecycledFiles(tmp_path / "spare")), make_update("a")
    journal.commit(put(journal, update))
    read = journal.read("a", SPEC)
    for _ in range(2):
        assert {n: p.values.tobytes() for n, p in read.patches.items()} == {
            n: p.values.tobytes() for n, p in update.patches.items()
        }


def test_few_pages_of_a_file_stay_in_memory(tmp_path, monkeypatch):
    file, part = tmp_path / "file", 1 << 20
    file.write_bytes(bytes(8 * part))
    monkeypatch.setattr(stored_patches, "MAX_PRESENT", part)
    with file.open("rb") as opened:
        pages = stored_patches.Pages(opened.fileno())
    assert [0] * 8 == [max(pages.use(i * part, part)) for i in range(8)]
    maps = Path("/proc/self/smaps").read_text().partition(f"{file}\n")[2]
    assert 0 < int(re.search(r"^Rss: +(\d+) kB", maps, re.MULTILINE)[1]) <= 3 * part // 1024
