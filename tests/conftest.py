"""For all tests: this checkout is what child processes import, and skipped tests are counted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.skips import (  # noqa: F401  (pytest finds its hooks here)
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)

ROOT = Path(__file__).parents[1]
SOURCES = (".", "services/common", "services/coordinator", "services/aggregator", "agents/edge")
"""As ``pythonpath`` in pyproject.toml; that is for the test process only."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell; processes that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / folder) for folder in SOURCES)
