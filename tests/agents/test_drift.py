"""A device measures its profile again in idle time only, never between two tasks."""

from __future__ import annotations

import asyncio

import pytest
from fedel_edge.drift import is_idle


@pytest.mark.parametrize(
    ("busy", "done", "idle"), [(False, 0, True), (True, 0, False), (False, 1, False), (True, 1, False)]
)
def test_a_moment_between_two_tasks_is_no_idle_time(busy: bool, done: int, idle: bool) -> None:
    """``done`` tasks came and went meanwhile; one may be under way at the end."""
    counts = iter([7, 7 + done])
    assert idle == asyncio.run(is_idle(0.0, lambda: busy, lambda: next(counts)))
