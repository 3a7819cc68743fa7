"""Logging for servers and agents: one JSON object per line, or plain text for people."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from fedel import request_id


class JsonLines(logging.Formatter):
    """One JSON object per line; ``extra={"run": ..., "round": ..., "client": ...}`` become fields of it."""

    converter = staticmethod(time.gmtime)
    _PLAIN = frozenset(vars(logging.makeLogRecord({})))

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in vars(record).items() if k not in self._PLAIN and k != "message"})
        if request := request_id.current():
            line["request"] = request
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PlainLines(logging.Formatter):
    """Text for people: time in UTC, level, run if it is about one, message, id of the request in brackets.

    What others sent can neither begin a line of its own nor control the terminal.
    """

    converter = staticmethod(time.gmtime)

    def formatMessage(self, record: logging.LogRecord) -> str:
        words = [self.formatTime(record, "%Y-%m-%d %H:%M:%SZ"), record.levelname]
        words += [str(run)] if (run := getattr(record, "run", "")) else []
        words += [record.getMessage()]
        words += [f"[{request}]"] if (request := request_id.current()) else []
        return visible(" ".join(words))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {visible(line)}" for line in super().formatException(ei).split("\n"))


def visible(text: str) -> str:
    """The text with everything that is not printed written as an escape.

    >>> visible("a\\nERROR \\x1b[2J")
    'a\\\\nERROR \\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def set_up_logging(level: str = "INFO", as_json: bool = True) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else PlainLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
