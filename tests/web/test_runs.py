"""The page with no run, with one, and with many: what it opens, finds and says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedel.v1 import coordinator_pb2 as pb
from tests.services.coordinator.support import Federation, asynchronous, run_config
from tests.web.browser import browsing, program
from tests.web.support import TOKEN, shown

pytestmark = pytest.mark.skipif(program() is None, reason="Chromium is missing: apt-get install chromium")
ROWS = "[...document.querySelectorAll('#run-table tbody tr')]"
NAME = "document.getElementById('name').textContent"
WAITS = run_config(min_clients=9)


async def many_runs(federation: Federation, number: int) -> None:
    """The oldest is active, the others are over."""
    await federation.create(WAITS, "active")
    for n in range(number - 1):
        await federation.create(WAITS, f"old-{n}")
        await federation.control(pb.RUN_ACTION_STOP_NOW, f"old-{n}")


@asynchronous
async def test_the_page_opens_on_an_active_run_and_finds_any_of_fifty(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker), browsing(tmp_path / "profile") as page:
        await many_runs(federation, 50)
        await page.show_as(360, 640)
        await page.open(asker.address)
        await page.until(f"{NAME} === 'active'")
        assert 360 >= await page.run("document.documentElement.scrollWidth")
        assert "All 50 runs" == await page.run("document.getElementById('num-runs').textContent")
        await page.run("document.getElementById('all-runs').open = true")
        await page.until(f"{ROWS}.length === 50")
        await page.run("document.getElementById('find-run').value = 'OLD-17'")
        await page.run("document.getElementById('find-run').dispatchEvent(new Event('input'))")
        await page.until(f"{ROWS}.length === 1")
        assert "s ago" in await page.run(f"{ROWS}[0].textContent")
        await page.run(f"{ROWS}[0].querySelector('button').click()")
        await page.until(f"{NAME} === 'old-17'")
        assert "fedel runs fetch old-17" in await page.run("document.getElementById('fetch').textContent")
        assert "stopped before its first round" == await page.run(
            "document.getElementById('notice').textContent"
        )
        assert [] == page.complaints


@asynchronous
async def test_a_run_without_rounds_says_so_and_explains_t_th(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker), browsing(tmp_path / "profile") as page:
        await page.open(asker.address)
        await page.until("!document.getElementById('empty').hidden")
        assert "live" == await page.run("document.getElementById('link').textContent")
        await federation.create(WAITS)
        for chart in ("accuracy", "latency", "bytes"):
            await page.until(f"document.getElementById('{chart}').textContent === 'no round yet'")
        told = "[...document.querySelectorAll('#figures dt')].find((dt) => dt.textContent === 'T_th').title"
        assert "Time budget of one training step" in await page.run(told)
        assert await page.run("document.getElementById('verbs').hidden"), "nobody may control it from here"
        assert [] == page.complaints


@asynchronous
async def test_a_run_is_paused_and_stopped_with_a_reason(tmp_path: Path) -> None:
    async with shown(tmp_path, http_token=TOKEN) as (federation, asker), browsing(tmp_path / "profile") as page:
        await federation.create(WAITS)
        await page.open(asker.address)
        await page.until("!document.getElementById('verbs').hidden")
        await page.run(f"document.getElementById('token').value = '{TOKEN}'")
        await page.run("document.getElementById('why').value = 'wrong <data>'")
        await page.run("document.querySelector('#verbs [value=pause]').click()")
        notice = "document.getElementById('notice').textContent"
        await page.until(f"{notice}.startsWith('paused by somebody at the live page: wrong <data>')")
        assert await page.run("document.querySelector('#verbs [value=pause]').hidden")
        await page.run("window.confirm = () => true")
        await page.run("document.querySelector('#verbs [value=stop]').click()")
        await page.until(
            f"{notice} === 'stopped by somebody at the live page before its first round: wrong <data>'"
        )
        assert await page.run("document.getElementById('verbs').hidden")
        assert [] == page.complaints
