from __future__ import annotations

import asyncio
import threading
from types import FrameType
from typing import Any

import pytest
from fedel_edge.worker import Worker


async def busy_in_second_job(num_lines: int) -> bool | None:
    """A job arrives when the worker's thread has run this many lines since the end of the job before it.

    ``None`` if that many lines are never run before the first job's result is there.
    """
    ended, reached, arrived = threading.Event(), threading.Event(), threading.Event()
    lines = iter(range(1000))

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        if frame.f_code is not Worker._loop.__code__:
            return None
        if kind == "line" and ended.is_set() and next(lines) == num_lines:
            reached.set()
            arrived.wait(0.2)  # not for ever: here the thread may hold a lock that a new job needs
        return trace

    before = threading.gettrace()
    threading.settrace(trace)
    worker = Worker()
    threading.settrace(before)
    first = asyncio.ensure_future(worker.run(ended.set))
    while not (reached.is_set() or first.done()):
        await asyncio.sleep(0)
    if not reached.is_set():
        return None
    second = asyncio.ensure_future(worker.run(lambda: worker.busy))
    await asyncio.sleep(0)
    arrived.set()
    await first
    return await second


def test_busy_while_a_job_runs() -> None:
    """Also when the job arrives while the one before it ends, whatever line the thread has come to."""
    seen = [asyncio.run(busy_in_second_job(num_lines)) for num_lines in range(10)]
    assert {True} == set(seen) - {None}
    assert seen.index(None) >= 3


def test_idle_after_all_jobs() -> None:
    async def scenario() -> None:
        worker, release = Worker(), threading.Event()
        assert not worker.busy
        held = asyncio.ensure_future(worker.run(release.wait))
        await asyncio.sleep(0)
        assert worker.busy
        release.set()
        await held
        assert not worker.busy

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError(), ValueError("odd")]
)
def test_no_error_ends_the_thread(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def scenario() -> int:
        worker = Worker()
        with pytest.raises(Exception, match=f"{type(error).__name__}|odd"):
            await asyncio.wait_for(worker.run(fail), 5)
        return await asyncio.wait_for(worker.run(lambda: 7), 5)

    assert 7 == asyncio.run(scenario())
