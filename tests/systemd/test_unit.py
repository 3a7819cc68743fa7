"""The unit before systemd's own judges; under a running systemd it was tried as docs/jetson.md tells."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "systemd" / "fedel-agent.service"
MOST_EXPOSED = 3.0

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """With a command that exists here, which ``verify`` insists on."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/fedel/bin/fedel", sys.executable))
    return path


def analysed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *words], capture_output=True, text=True, check=False
    )


def test_systemd_finds_nothing_to_complain_about(unit: Path) -> None:
    """It ends with 0 even when it does: what it says counts."""
    done = analysed("verify", str(unit))
    assert (0, "") == (done.returncode, done.stderr)


def test_a_word_that_systemd_does_not_know_would_be_seen(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("RestartSec=", "RestartSecs="))
    assert "RestartSecs" in analysed("verify", str(unit)).stderr


def test_it_is_exposed_little(unit: Path) -> None:
    done = analysed("security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:.0f}", str(unit))
    exposed = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposed is not None, done.stderr
    assert (0, True) == (done.returncode, float(exposed[1]) < MOST_EXPOSED), done.stdout


def test_the_judge_would_refuse_a_unit_without_protection(unit: Path) -> None:
    bare = [
        line
        for line in unit.read_text().splitlines()
        if not re.match("(Protect|Restrict|SystemCall|Cap)", line)
    ]
    unit.write_text("\n".join(bare))
    assert (
        0
        != analysed("security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:.0f}", str(unit)).returncode
    )
