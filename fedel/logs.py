"""Logging for servers and agents: one JSON object per line, or plain text for people."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


class JsonLines(logging.Formatter):
    """One JSON object per line; ``extra={"run": ..., "round": ..., "client": ...}`` become fields of it."""

    _PLAIN = frozenset(vars(logging.makeLogRecord({})))

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in vars(record).items() if k not in self._PLAIN and k != "message"})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PlainLines(logging.Formatter):
    """Text for people. What others sent can neither begin a line of its own nor control the terminal."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record))

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
