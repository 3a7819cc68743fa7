from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _every_line(caplog: pytest.LogCaptureFixture) -> None:
    """The lines that tests here read are of this level too."""
    caplog.set_level(logging.INFO)
