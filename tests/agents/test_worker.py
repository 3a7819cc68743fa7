from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from fedel_edge.worker import Worker


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as Python allows, so that a race shows within a second."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_busy_while_a_job_runs(eager_switches: None) -> None:
    """Also when the job arrives in the moment in which the one before it ends."""

    async def scenario() -> list[bool]:
        worker, seen = Worker(), []
        for _ in range(3000):
            first = asyncio.ensure_future(worker.run(lambda: spin(random.uniform(0, 5e-5))))
            await asyncio.sleep(0)
            spin(random.uniform(0, 5e-5))
            second = asyncio.ensure_future(worker.run(lambda: seen.append(worker.busy)))
            await asyncio.gather(first, second)
        return seen

    assert {True} == set(asyncio.run(scenario()))


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
