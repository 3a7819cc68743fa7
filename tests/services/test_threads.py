"""Numeric libraries have no threads of their own in a server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = """
import os
import {module}.__main__
import numpy
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize("module", ["fedel_aggregator", "fedel_coordinator"])
def test_a_server_starts_with_one_thread(module):
    """A product at a round's end would wake those of numpy's BLAS, which then spin."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    words = [sys.executable, "-c", COUNT.format(module=module)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert "1" == done.stdout.strip()
