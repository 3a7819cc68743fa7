"""How often somebody may do something: a few times at once, then at a steady rate."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from fedel.security.tls import host_of

MAX_KEYS = 10_000
"""Those who came least recently are forgotten first, so that strangers cannot fill the memory."""
LOG_BURST, LOG_SECONDS = 20, 10.0
"""Lines about refused calls from one address: this many at once, then one after each such time."""


class Rates:
    """A bucket for each key: ``burst`` at once, one more every ``seconds``.

    >>> now = [0.0]
    >>> rates = Rates(burst=2, seconds=10, clock=lambda: now[0])
    >>> [rates.allow("a"), rates.allow("a"), rates.allow("a"), rates.allow("b")]
    [True, True, False, True]
    >>> now[0] = 10.0
    >>> [rates.allow("a"), rates.allow("a")]
    [True, False]
    """

    def __init__(self, burst: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._seconds, self._clock = burst, seconds, clock
        self._full_at: OrderedDict[str, float] = OrderedDict()
        """When the bucket of each key is full again."""

    def allow(self, key: str) -> bool:
        """Whether it may happen now; if so, it counts."""
        now = self._clock()
        full_at = max(now, self._full_at.pop(key, now)) + self._seconds
        allowed = full_at - now <= self._burst * self._seconds
        self._full_at[key] = full_at if allowed else full_at - self._seconds
        if len(self._full_at) > MAX_KEYS:
            self._full_at.popitem(last=False)
        return allowed


def peer_host(peer: str) -> str:
    """The address of a gRPC peer without its port.

    >>> peer_host("ipv4:10.0.0.7:40112"), peer_host("ipv6:%5B::1%5D:40112"), peer_host("unix:")
    ('10.0.0.7', '::1', 'unix')
    """
    return "unix" if peer.startswith("unix:") else host_of(unquote(peer))


class LimitedLog:
    """Lines about refused calls: anyone who makes many does not fill the log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._rates, self._num_unwritten = log, Rates(LOG_BURST, LOG_SECONDS), 0

    def write(self, level: int, message: str, about: Mapping[str, Any]) -> None:
        """``about`` has the caller's address, as ``peer``."""
        if not self._rates.allow(peer_host(about["peer"])):
            self._num_unwritten += 1
            return
        left_out, self._num_unwritten = self._num_unwritten, 0
        more = f" ({left_out} more refused calls have no line)" if left_out else ""
        self._log.log(level, "%s%s", message, more, extra=dict(about))
