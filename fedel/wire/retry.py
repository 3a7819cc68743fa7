"""Trying again: which errors are worth it, how long to wait, and the loop around an attempt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
from grpc import aio

T = TypeVar("T")

RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)
"""CANCELLED: a server that stops ends its calls so, and a proxy too. What we cancel ourselves has no status."""

PORTS = "by default a coordinator listens on 7070, an aggregator on 7071, enrolment on 7072, the page on 7080"
IN_OUR_WORDS = {
    "Method not found": f"the server at this port is another service, or an older version: {PORTS}",
    "Failed parsing HTTP/2": f"no gRPC server is at this port; is it the page? {PORTS}",
    "WRONG_VERSION_NUMBER": f"the server at this port does not use certificates; is it the page? {PORTS}",
    "Hostname Verification Check failed": "the certificate of the server is for other names than this one: use"
    " a name that is in it, or issue it again with --host NAME",
}
"""By what gRPC says: it has no words for what people do wrong."""
MAX_DETAILS = 200
"""Letters of what gRPC says, where our words come first."""


def is_transient(error: Exception) -> bool:
    """Whether a call may succeed when it is repeated: the server was away or had too much to do."""
    return isinstance(error, aio.AioRpcError) and error.code() in RETRIED


def describe(error: Exception) -> str:
    """What went wrong, in the server's words if it sent any, and in ours for what gRPC says by itself."""
    if not isinstance(error, aio.AioRpcError):
        return str(error)
    details, meant = error.details() or error.code().name, mistake(error)
    return f"{meant} ({details[:MAX_DETAILS]})" if meant else details


def mistake(error: aio.AioRpcError) -> str:
    """What a person did wrong, where what gRPC says gives it away; otherwise empty."""
    details = error.details() or ""
    return next((words for sign, words in IN_OUR_WORDS.items() if sign in details), "")


def backoff_seconds(attempt: int, longest: float = 30.0) -> float:
    """How long to wait before the next try: doubling, with jitter so that a fleet does not come at once."""
    return float(min(longest, 0.2 * 2 ** min(attempt, 30)) * random.uniform(0.5, 1.0))


@dataclass
class Backoff:
    """Counts failures in a row. A stream that made progress calls ``reset``, so that it is soon tried again."""

    longest_seconds: float = 30.0
    failures: int = 0

    def reset(self) -> None:
        self.failures = 0

    @property
    def seconds(self) -> float:
        """How long to wait now."""
        return backoff_seconds(max(0, self.failures - 1), self.longest_seconds)


async def retrying(
    attempt: Callable[[], Awaitable[T]],
    *,
    retried: Callable[[Exception], bool] = is_transient,
    on_failure: Callable[[Exception, int], None] | None = None,
    backoff: Backoff | None = None,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """The result of the first attempt that succeeds. An error that is not ``retried`` is raised at once.

    ``on_failure`` gets every other error and how many there were in a row (1 is the first: log that one); it
    raises to give up. Cancelling gives up too. ``sleep`` may return early, to try again at once.
    """
    backoff = backoff or Backoff()
    while True:
        try:
            return await attempt()
        except Exception as error:
            if not retried(error):
                raise
            backoff.failures += 1
            if on_failure is not None:
                on_failure(error, backoff.failures)
        await sleep(backoff.seconds)
