from __future__ import annotations

import asyncio

import pytest
from fedel_coordinator.news import News

from tests.services.coordinator.support import asynchronous


@asynchronous
async def test_waiting_ends_when_the_condition_holds() -> None:
    news, state = News(), [0]
    waiting = asyncio.create_task(news.until(lambda: state[0] == 2))
    for value in (1, 2):
        await asyncio.sleep(0)
        assert not waiting.done()
        state[0] = value
        news.notify()
    assert await waiting


@asynchronous
async def test_waiting_ends_at_its_time() -> None:
    assert not await News().until(lambda: False, 0.01)
    assert not await News().until(lambda: False, -1)
    assert await News().until(lambda: True, -1)


@asynchronous
async def test_a_cancellation_that_comes_together_with_news_is_not_lost() -> None:
    news = News()
    waiting = asyncio.create_task(news.until(lambda: False, 60))
    await asyncio.sleep(0)
    news.notify()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 5)
