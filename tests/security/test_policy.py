"""SECURITY.md names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_line_of_the_threat_model_is_held_by_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row.startswith("| **")]
    assert len(rows) > 10
    for row in rows:
        denied = row.split(" | ")[2].strip(" |")
        assert bool(denied) == bool(NAMED.findall(row)), row[:60]
    for path, name in NAMED.findall(text):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"
