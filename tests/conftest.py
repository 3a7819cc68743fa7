"""For all tests: what child processes import, how skipped tests are counted, and logging as it was before."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc  # noqa: F401  (before fedel.wire is: that makes gRPC silent, and tests read its lines)
import pytest

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


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A test that calls the ``main`` of a server sets the level of the whole process; those after it would not
    see the warnings that they wait for."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
