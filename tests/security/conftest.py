from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _every_line(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever level a process that ran in an earlier test has set."""
    caplog.set_level(logging.INFO)
