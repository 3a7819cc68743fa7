"""The id of a request: a caller sends it with its call, and every line that is logged because of it has it."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

HEADER = "fedel-request"
"""Metadata of every call."""
_REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Tasks and threads that work on a request inherit it."""
_GOOD = re.compile(r"[A-Za-z0-9._-]{1,64}")


def current() -> str:
    """The id of the request that is being worked on; empty if there is none."""
    return _REQUEST.get()


def begin(sent: str | bytes = "") -> None:
    """Work on a request with the id that the caller sent; with a new one if it sent none that can be used."""
    text = sent.decode(errors="replace") if isinstance(sent, bytes) else sent
    _REQUEST.set(text if _GOOD.fullmatch(text) else _new())


def ensure() -> None:
    """Go on with the request that is being worked on, or begin one."""
    if not current():
        begin()


def to_send() -> tuple[str, str]:
    """For the metadata of a call."""
    return HEADER, current() or _new()


def _new() -> str:
    return secrets.token_hex(8)
