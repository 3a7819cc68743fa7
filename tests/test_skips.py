"""Skipped tests fail where everything is meant to run, also with several workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import LIST_VARIABLE, VARIABLE, allowed

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="no browser")
def test_marked(): ...

def test_called():
    pytest.skip("no database")

@pytest.mark.xfail
def test_expected_to_fail():
    assert False

def test_good(): ...
"""
MODULE = "import pytest\npytest.importorskip('no_such_module')\ndef test_inside(): ...\n"
LIST = '[[skip]]\ntest = "test_it.py::test_marked"\nreason = "the machine has no browser"\n'


def pytest_says(folder: Path, ci: str, *words: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "allowed.toml").write_text(LIST)
    environment = {**os.environ, VARIABLE: ci, LIST_VARIABLE: str(folder / "allowed.toml")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.skips", "--rootdir", str(folder), *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_only_listed_skips_pass(tmp_path: Path, workers: tuple[str, ...]) -> None:
    code, said = pytest_says(tmp_path, "1", *workers)
    assert 1 == code
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed" in said
    assert "forbids: no database" in said
    assert "= 1 skipped =" in said
    assert "test_it.py::test_marked: no browser" in said


def test_a_module_that_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_module.py").write_text(MODULE)
    code, said = pytest_says(tmp_path, "1", "test_module.py")
    assert code != 0
    assert "could not import 'no_such_module'" in said
    assert 0 == pytest_says(tmp_path, "", "test_module.py", "test_it.py")[0]


def test_elsewhere_skips_are_counted(tmp_path: Path) -> None:
    code, said = pytest_says(tmp_path, "")
    assert 0 == code
    assert "= 2 skipped =" in said
    assert "test_it.py::test_called: no database" in said


def test_the_list_of_this_repository_has_reasons() -> None:
    assert all("::" in pattern or pattern.endswith(".py") for pattern in allowed())
