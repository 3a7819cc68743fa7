from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from fedel.files import open_atomic, safe_name, write_atomic


class Syscalls:
    """Writes down what was synced and renamed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        fsync, replace = os.fsync, Path.replace

        def noted_fsync(handle: int) -> None:
            kind = "directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
            self.seen.append(f"sync {kind}")
            fsync(handle)

        def noted_replace(path: Path, target: Path) -> Path:
            self.seen.append("rename")
            return replace(path, target)

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(Path, "replace", noted_replace)


@pytest.fixture
def syscalls(monkeypatch: pytest.MonkeyPatch) -> Syscalls:
    return Syscalls(monkeypatch)


@pytest.mark.parametrize(
    ("data", "expected"), [(b"\x00\xff", b"\x00\xff"), ("größe", "größe".encode()), ("", b"")]
)
def test_write(tmp_path: Path, data: bytes | str, expected: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old and longer than the new content")
    write_atomic(path, data)
    assert expected == path.read_bytes()
    assert [path] == list(tmp_path.iterdir())


def test_durable_order(tmp_path: Path, syscalls: Syscalls) -> None:
    write_atomic(tmp_path / "a", b"1")
    assert ["sync file", "rename", "sync directory"] == syscalls.seen


def test_new_directories_are_synced(tmp_path: Path, syscalls: Syscalls) -> None:
    write_atomic(tmp_path / "x" / "y" / "a", b"1")
    assert ["sync directory"] * 2 + ["sync file", "rename", "sync directory"] == syscalls.seen


def test_not_durable(tmp_path: Path, syscalls: Syscalls) -> None:
    write_atomic(tmp_path / "x" / "a", b"1", durable=False)
    assert ["rename"] == syscalls.seen


def test_failed_write_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"old")
    with pytest.raises(TypeError), open_atomic(path) as file:
        file.writelines([b"half of the n", "not bytes"])  # type: ignore[list-item]
    assert b"old" == path.read_bytes()
    assert [path] == list(tmp_path.iterdir())


def test_pieces(tmp_path: Path) -> None:
    with open_atomic(tmp_path / "a") as file:
        file.writelines([b"ab", memoryview(b"cd")])
    assert b"abcd" == (tmp_path / "a").read_bytes()


def test_mode_from_first_byte(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with open_atomic(tmp_path / "key", mode=0o600):
            (part,) = tmp_path.iterdir()
            assert 0o600 == stat.S_IMODE(part.stat().st_mode)
        write_atomic(tmp_path / "open", b"")
    finally:
        os.umask(before)
    assert 0o600 == stat.S_IMODE((tmp_path / "key").stat().st_mode)
    assert 0o644 == stat.S_IMODE((tmp_path / "open").stat().st_mode)


def test_two_writers(tmp_path: Path) -> None:
    """Each writes a whole file of its own; the last one to finish wins."""
    path, inner = tmp_path / "a", threading.Thread(target=lambda: write_atomic(tmp_path / "a", b"inner"))
    with open_atomic(path) as file:
        file.write(b"out")
        inner.start()
        inner.join()
        assert b"inner" == path.read_bytes()
        file.write(b"er")
    assert b"outer" == path.read_bytes()


def test_longest_file_name(tmp_path: Path) -> None:
    for letter in ("x", "ü"):
        path = tmp_path / (letter * (255 // len(letter.encode())))
        write_atomic(path, b"1")
        assert b"1" == path.read_bytes()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\x00b", "é" * 300, "x" * 10_000, "a+b", "%", "~"])
def test_safe_name_is_one_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / safe_name(name)
    path.touch()
    assert [path] == list(tmp_path.iterdir())


def test_safe_names_differ() -> None:
    long = "x" * 200
    names = ["", "%", "a.b", "a%2Eb", "a/b", long, long + "y", "y" + long, safe_name(long)]
    assert len(names) == len({safe_name(name) for name in names})
