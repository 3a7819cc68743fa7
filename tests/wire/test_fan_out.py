from __future__ import annotations

import asyncio

import pytest

from fedel.wire.fan_out import fan_out


def test_results_in_order() -> None:
    async def scenario() -> list[int]:
        first_may_end = asyncio.Event()

        async def first() -> int:
            await first_may_end.wait()
            return 1

        async def second() -> int:
            first_may_end.set()
            return 2

        return await asyncio.wait_for(fan_out([first(), second()]), 5)

    assert [1, 2] == asyncio.run(scenario())


def test_none() -> None:
    assert [] == asyncio.run(fan_out([]))


@pytest.mark.parametrize("how", ["failure", "cancel"])
def test_others_have_ended_when_it_raises(how: str) -> None:
    async def scenario() -> list[str]:
        ended: list[str] = []

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append("cancelled")

        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError(how)

        calls = [waits(), waits()] + ([fails()] if how == "failure" else [])
        task = asyncio.ensure_future(fan_out(calls))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if how == "cancel":
            task.cancel()
        with pytest.raises((ValueError, asyncio.CancelledError)):
            await task
        return ended

    assert ["cancelled"] * 2 == asyncio.run(scenario())
