"""Lines of a log: what they hold, and that what others send cannot forge them or control the terminal."""

from __future__ import annotations

import ast
import json
import logging
import re
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from fedel import request_id
from fedel.logs import JsonLines, PlainLines

EVIL = "client-1\nERROR all models are lost\r\x1b]0;title\x07\x1b[2J\x9b2J\u2028\u202egnp"
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ "
ROOT = Path(__file__).parents[1]


def record(message: str, *values: object, error: Exception | None = None, run: str = "") -> logging.LogRecord:
    info = (type(error), error, None) if error else None
    made = logging.LogRecord("fedel", logging.INFO, "here", 1, message, values, info)
    if run:
        made.run = run
    return made


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose zone is not UTC, and no request."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    before = request_id._REQUEST.set("")
    yield
    request_id._REQUEST.reset(before)
    monkeypatch.undo()
    time.tzset()


def test_plain_lines_are_printable_and_one() -> None:
    line = PlainLines().format(record("%s joined", EVIL))
    assert line.isprintable()
    assert re.match(STAMP + re.escape(r"INFO client-1\nERROR all models are lost\r\x1b]0;title\x07"), line)
    line = PlainLines().format(record("%s joined", "größe 3 µs", run="night\n1"))
    assert re.fullmatch(STAMP + r"INFO night\\n1 größe 3 µs joined", line)


def test_errors_keep_their_lines_but_none_begins_like_a_record() -> None:
    lines = PlainLines().format(record("failed", error=ValueError(EVIL))).splitlines()
    assert re.fullmatch(STAMP + "INFO failed", lines[0])
    assert all(line.startswith("  ") and line.isprintable() for line in lines[1:])


@pytest.mark.parametrize("error", [None, ValueError(EVIL)])
def test_json_lines_are_one_line(error: Exception | None) -> None:
    line = JsonLines().format(record("%s", EVIL, error=error))
    assert line.isprintable()
    assert EVIL == json.loads(line)["message"]


def test_times_are_utc_and_say_so() -> None:
    said = json.loads(JsonLines().format(record("now")))["time"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said)
    told = [datetime.fromisoformat(said.replace("Z", "+00:00"))]
    plain = PlainLines().format(record("now")).partition("Z ")[0]
    told.append(datetime.fromisoformat(f"{plain}+00:00"))
    for moment in told:
        assert abs(datetime.now(timezone.utc) - moment) < timedelta(minutes=1)


def test_lines_have_the_request_that_is_being_worked_on() -> None:
    assert "request" not in json.loads(JsonLines().format(record("now")))
    request_id.begin("abc-1")
    assert "abc-1" == json.loads(JsonLines().format(record("now")))["request"]
    assert PlainLines().format(record("now")).endswith("INFO now [abc-1]")


@pytest.mark.parametrize("sent", ["", "a b", "x" * 65, "a\nb", b"\xff\xfe", "größe"])
def test_an_id_that_cannot_be_used_is_replaced(sent: str | bytes) -> None:
    request_id.begin(sent)
    assert re.fullmatch("[0-9a-f]{16}", request_id.current())


def _keys(node: ast.AST) -> Iterator[str]:
    """Keys of every table in an expression."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Dict):
            yield from (key.value for key in inner.keys if isinstance(key, ast.Constant))


def logged_keys() -> set[str]:
    """What the code gives to its loggers beside the message."""
    found: set[str] = set()
    for folder in ("fedel", "services", "agents"):
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
        for text in (text for text in texts if "extra=" in text or "describe_call" in text or "eeper" in text):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    given = [word for word in node.keywords if word.arg]
                    found.update(key for word in given if word.arg == "extra" for key in _keys(word.value))
                    if name == "describe_call" or (name == "refuse" and "keeper" in ast.unparse(node.func)):
                        found.update(word.arg or "" for word in given)
                elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = {ast.unparse(target) for target in targets}
                    if names & {"fields", "about", "seconds", "log_fields"}:
                        found.update(_keys(node.value))
    return found


def test_the_docs_list_the_keys_of_a_line() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    section = page.partition("## Logs\n")[2].partition("\n## ")[0]
    listed = {
        key for cell in re.findall(r"^\| (`.+?) \| ", section, re.M) for key in re.findall("`(.+?)`", cell)
    }
    always = set(json.loads(JsonLines().format(record("now"))))
    assert listed == logged_keys() | always | {"error", "request"}
