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


def set_up_logging(level: str = "INFO", as_json: bool = True) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
