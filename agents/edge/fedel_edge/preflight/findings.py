"""What a check found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

ENROL = "`fedel certs token NAME` at the server prints a token; use it here: `fedel certs enrol TOKEN --at ...`"
GOOD, BAD, SKIPPED = "good", "bad", "skipped"


@dataclass(frozen=True)
class Finding:
    check: str
    """What was checked, in a word or two."""
    state: str
    """``good``, ``bad`` or ``skipped``."""
    said: str
    remedy: str = ""
    """What to do; empty if there is nothing to do."""


def good(check: str, said: str) -> Finding:
    return Finding(check, GOOD, said)


def bad(check: str, said: str, remedy: str) -> Finding:
    return Finding(check, BAD, said, remedy)


def skipped(check: str, said: str, remedy: str = "") -> Finding:
    return Finding(check, SKIPPED, said, remedy)


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
