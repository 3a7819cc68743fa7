from __future__ import annotations

import asyncio

import pytest
from fedel_coordinator.change_signal import ChangeSignal, wait_for_event

from tests.services.coordinator.support import asynchronous


@asynchronous
async def test_every_change_wakes_all_that_wait() -> None:
    signal = ChangeSignal()
    waiting = asyncio.create_task(wait_for_event(signal.next(), None))
    await asyncio.sleep(0)
    assert not waiting.done()
    signal.notify()
    assert await waiting
    assert not signal.next().is_set()


@asynchronous
async def test_waiting_ends_at_its_time() -> None:
    assert not await wait_for_event(asyncio.Event(), 0.01)
    assert not await wait_for_event(asyncio.Event(), 0.0)


@asynchronous
async def test_a_cancellation_together_with_a_change_is_not_lost() -> None:
    signal = ChangeSignal()
    waiting = asyncio.create_task(wait_for_event(signal.next(), 60))
    await asyncio.sleep(0)
    signal.notify()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 5)
