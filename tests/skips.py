"""Where everything is meant to run (``FEDEL_CI=1``), a test that is skipped fails.

``allowed_skips.toml`` lists the exceptions. A section at the end gives the number of skips and their reasons.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "FEDEL_CI"
LIST_VARIABLE = "FEDEL_ALLOWED_SKIPS"
"""Another list, for the tests of this file."""


@cache
def allowed() -> tuple[str, ...]:
    """Patterns of test names; every entry of the list must have a reason."""
    path = os.environ.get(LIST_VARIABLE) or Path(__file__).with_name("allowed_skips.toml")
    entries = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("skip", [])
    if not all(entry.get("reason") for entry in entries):
        raise pytest.UsageError(f"{path}: every [[skip]] needs a test and a reason")
    return tuple(entry["test"] for entry in entries)


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get(VARIABLE, "") in ("", "0"):
        return
    if not any(fnmatch(report.nodeid, pattern) for pattern in allowed()):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped, which {VARIABLE} forbids: {_reason(report)}\n"
            "Install what is missing (.ci/run does), or add the test and a reason to tests/allowed_skips.toml"
        )


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _judge(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.section(f"{len(skipped)} skipped")
    for report in skipped:
        terminalreporter.line(f"{report.nodeid}: {_reason(report)}")
