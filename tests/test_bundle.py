"""The code of a job as one text: made in one form, read back with care."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from fedel import bundle
from fedel.bundle import Bundle, pack, read
from fedel.errors import ConfigError


def write(folder: Path, **files: str) -> None:
    for name, source in files.items():
        path = folder / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def test_the_same_files_have_the_same_hash_wherever_they_lie(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder, own="X = 1\n", helpers="Y = 'é'\n")
        (tmp_path / folder / "__pycache__").mkdir()
        (tmp_path / folder / "__pycache__" / "own.py").write_text("")
        (tmp_path / folder / "notes.txt").write_text(folder)
    one, other = pack([tmp_path / "a"]), pack([tmp_path / "b" / "helpers.py", tmp_path / "b" / "own.py"])
    assert one == other
    assert one.sha256 == other.sha256 == hashlib.sha256(one.text).hexdigest()
    assert {"helpers", "own"} == one.tops
    assert one == read(one.text)
    write(tmp_path / "b", own="X = 2\n")
    assert one.sha256 != pack([tmp_path / "b"]).sha256


def test_a_package_keeps_its_name_and_another_folder_does_not(tmp_path: Path) -> None:
    write(tmp_path / "nets", __init__="", small="")
    write(tmp_path / "loose", own="")
    assert ["nets/__init__.py", "nets/small.py", "own.py"] == sorted(
        pack([tmp_path / "nets", tmp_path / "loose"]).files
    )


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    write(tmp_path, own="X = 1\n")
    (tmp_path / "linked.py").symlink_to(tmp_path / "own.py")
    with pytest.raises(ConfigError, match=r"linked\.py is a link: name the file that it leads to"):
        pack([tmp_path])
    (tmp_path / "linked.py").unlink()
    (tmp_path / "own.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"own\.py cannot be read as Python source in UTF-8"):
        pack([tmp_path])
    with pytest.raises(ConfigError, match="there is no Python file"):
        pack([tmp_path / "nothing"])
    write(tmp_path / "a", own="1")
    write(tmp_path / "b", own="2")
    with pytest.raises(ConfigError, match=r"has another own\.py already; rename one"):
        pack([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize(
    "path",
    [
        "../own.py",
        "/etc/own.py",
        "a/../../own.py",
        "own.so",
        "own",
        "a b.py",
        "a\\b.py",
        ".hidden.py",
        "a//b.py",
        "./own.py",
        "own.py/",
        "own.py\n.py",
        "ümlaut.py",
        "/".join("a" * 9) + ".py",
        "a" * 300 + ".py",
        "C:own.py",
        "",
    ],
)
def test_a_name_that_could_lead_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="not a Python file with a plain path"):
        read(json.dumps({path: ""}, separators=(",", ":"), ensure_ascii=False).encode())


@pytest.mark.parametrize("top", ["os", "queue", "fedel", "fedel_edge", "fedel_job_1"])
def test_a_name_of_python_or_of_ours_is_refused(top: str) -> None:
    with pytest.raises(ConfigError, match="called like a module of Python or of FedEL: rename it"):
        Bundle({f"{top}/__init__.py": ""})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"PK\x03\x04", "cannot be read"),
        (b'{"own.py": ""}', "not in its one form"),
        (b'{"own.py":"a","own.py":"b"}', "not in its one form"),
        (b'{"own.py":1}', "not a table of Python files"),
        (b"[]", "not a table of Python files"),
        (b"{}", "has 0 files"),
        (b'{"own.py":"\\ud800"}', "not text"),
        (b"\xff", "cannot be read"),
    ],
)
def test_what_is_no_bundle_is_refused(text: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(text)


def test_size_and_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has 1001 files, which is not between 1 and 1000"):
        Bundle({f"m{number}.py": "" for number in range(1001)})
    monkeypatch.setattr(bundle, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match="leave data out"):
        Bundle({"own.py": "x" * 1000})
    with pytest.raises(ConfigError, match="more than"):
        read(b'{"own.py":"' + b"x" * 1000 + b'"}')
