"""The newest lines of the coordinator's log, kept for the page: what happened, to which run and client."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_EVENTS = 500
LOGGER = "fedel_coordinator"


class Events(logging.Handler):
    """Numbers lines as they come; a follower gets those after the last it has."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        self._kept.append(
            {
                "id": self._count,
                "at": record.created,
                "level": record.levelname.lower(),
                "run": getattr(record, "run", ""),
                "round": getattr(record, "round", None),
                "client": getattr(record, "client", ""),
                "text": record.getMessage(),
            }
        )

    def since(self, event: int, run: str) -> list[dict[str, Any]]:
        """Events with a higher number, about this run or about none."""
        return [e for e in tuple(self._kept) if e["id"] > event and e["run"] in ("", run)]


@contextmanager
def capture_log() -> Iterator[Events]:
    """Keep what is logged in this context, down to the log's level."""
    events, logger = Events(), logging.getLogger(LOGGER)
    logger.addHandler(events)
    try:
        yield events
    finally:
        logger.removeHandler(events)
