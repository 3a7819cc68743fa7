"""What servers write is for their own user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def private(path: Path) -> bool:
    return not path.stat().st_mode & 0o077


@pytest.mark.parametrize("kind", ["aggregator", "coordinator"])
def test_data_is_not_readable_by_others(tmp_path: Path, kind: str) -> None:
    data = tmp_path / "data"
    settings = {"listen": "127.0.0.1:0", "port_file": data / "address", "log_level": "ERROR"}
    settings["data_dir" if kind == "aggregator" else "runs_dir"] = data
    if kind == "coordinator":
        settings["database_url"] = f"sqlite:///{tmp_path / 'coordinator.db'}"
    options = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    process = subprocess.Popen([sys.executable, "-m", f"fedel_{kind}", *options], umask=0o022)
    try:
        limit = time.monotonic() + 30
        while not (data / "address").exists():
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.05)
        made = [data, *data.rglob("*"), *tmp_path.glob("*.db*")]
        assert len(made) > 1
        assert [] == [path.name for path in made if not private(path)]
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(30)
