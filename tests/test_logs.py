"""What others send cannot forge lines of a log or control the terminal that shows it."""

from __future__ import annotations

import json
import logging

import pytest

from fedel.logs import JsonLines, PlainLines

EVIL = "client-1\nERROR all models are lost\r\x1b]0;title\x07\x1b[2J\x9b2J\u2028\u202egnp"


def record(message: str, *values: object, error: Exception | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error else None
    return logging.LogRecord("fedel", logging.INFO, "here", 1, message, values, info)


def test_plain_lines_are_printable_and_one() -> None:
    line = PlainLines().format(record("%s joined", EVIL))
    assert line.isprintable()
    assert line.startswith(r"INFO client-1\nERROR all models are lost\r\x1b]0;title\x07")
    assert "INFO größe 3 µs joined" == PlainLines().format(record("%s joined", "größe 3 µs"))


def test_errors_keep_their_lines_but_none_begins_like_a_record() -> None:
    lines = PlainLines().format(record("failed", error=ValueError(EVIL))).splitlines()
    assert "INFO failed" == lines[0]
    assert all(line.startswith("  ") and line.isprintable() for line in lines[1:])


@pytest.mark.parametrize("error", [None, ValueError(EVIL)])
def test_json_lines_are_one_line(error: Exception | None) -> None:
    line = JsonLines().format(record("%s", EVIL, error=error))
    assert line.isprintable()
    assert EVIL == json.loads(line)["message"]
