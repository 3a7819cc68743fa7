"""How glibc keeps the memory of a server; nothing happens where there is no glibc."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def one_heap() -> None:
    """One heap: each thread would have its own, and memory freed in one cannot be used by another."""
    _set(_ARENA_MAX, 1)


def keep_freed() -> None:
    """Memory that a round freed serves the next one, instead of going back to the system."""
    _set(_MMAP_THRESHOLD, 32 << 20)
    _set(_TRIM_THRESHOLD, 512 << 20)


def _set(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(option, value)
