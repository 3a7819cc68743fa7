"""How far a clock is off that of a server: with every health check the server tells its time."""

from __future__ import annotations

from typing import NamedTuple

HEADER = "fedel-time"
"""Trailing metadata of a health check: the server's Unix time in seconds."""


class Skew(NamedTuple):
    seconds: float
    """By how much the caller's clock is late; negative if it is early."""
    doubt_seconds: float
    """Half of the way there and back: the server's answer was on one of the two."""


def skew(told: str | bytes, sent: float, received: float) -> Skew:
    """From what the server told, and the caller's own Unix times around the call.

    >>> skew("1000.5", sent=1000.0, received=1000.2)
    Skew(seconds=0.4, doubt_seconds=0.1)
    """
    middle = (sent + received) / 2
    return Skew(round(float(told) - middle, 6), round((received - sent) / 2, 6))
