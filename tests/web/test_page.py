"""The live page in a real browser, while a run goes on."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.services.coordinator.support import RUN, asynchronous, run_config, trainers
from tests.web.browser import Page, browsing, program
from tests.web.support import ACCURACIES, shown

pytestmark = pytest.mark.skipif(program() is None, reason="Chromium is missing: apt-get install chromium")
SLOW = "client-3"
"""Four times slower than the fastest, so that its window is small and moves."""
WINDOW = "document.querySelector('#client-figures .window').getAttribute('aria-label')"
ROUNDS_CLOSED = "parseInt(document.querySelector('#figures dd small').textContent)"


async def click_on(page: Page, client: str) -> None:
    await page.until(f"document.querySelector('tr[data-client=\"{client}\"] button')")
    await page.run(f"document.querySelector('tr[data-client=\"{client}\"] button').click()")


@asynchronous
async def test_a_round_appears_a_client_is_opened_and_its_window_moves(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker), browsing(tmp_path / "profile") as page:
        await page.show_as(1280, 900)
        await page.open(asker.address)
        await page.until("!document.getElementById('empty').hidden")
        federation.start_agents(5, accuracies=ACCURACIES)
        await federation.create(run_config(num_rounds=500, min_clients=5))
        await page.until(f"{ROUNDS_CLOSED} >= 1")
        assert RUN == await page.run("document.getElementById('name').textContent")
        await click_on(page, SLOW)
        await page.until("!document.getElementById('client').hidden")
        before = await page.until(f"{WINDOW}.startsWith('blocks') && {WINDOW}")
        after = await page.until(f"{WINDOW} !== {before!r} && {WINDOW}")
        assert after.startswith("blocks ")
        assert await page.until("document.querySelector('#mine path.cells')?.getAttribute('d').length > 0")
        told = await page.until("document.querySelector('#seconds').getAttribute('aria-label')")
        assert told.endswith("download 0.50 s, train 2.0 s, upload 1.0 s")
        assert f"run={RUN}&client={SLOW}" in await page.run("location.hash")
        assert "live" == await page.run("document.getElementById('link').className")
        await page.run("dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
        await page.until("document.getElementById('client').hidden")
        assert SLOW == await page.run("document.activeElement.textContent")
        closed = await page.run(ROUNDS_CLOSED)
        await page.until(f"{ROUNDS_CLOSED} >= {closed + 2}")
        assert SLOW == await page.run("document.activeElement.textContent"), "its row was drawn again"
        assert [] == page.complaints


@asynchronous
async def test_names_stay_text_and_the_page_fits_a_small_phone(tmp_path: Path) -> None:
    name = "<img src=x onerror=document.title='bad'>"
    async with shown(tmp_path) as (federation, asker), browsing(tmp_path / "profile") as page:
        await page.show_as(360, 640, dark=True)
        federation.agent(name, trainers()["client-0"])
        federation.start_agents(3)
        await federation.create(run_config(num_rounds=2, min_clients=4))
        await federation.finished()
        await page.open(asker.address)
        await page.until(f"{ROUNDS_CLOSED} === 2")
        names = "[...document.querySelectorAll('#clients td button')].map(button => button.textContent)"
        assert name in await page.until(f"{names}.length === 4 && {names}")
        assert 0 == await page.run("document.querySelectorAll('#clients img').length")
        assert 360 >= await page.run("document.documentElement.scrollWidth")
        dark = await page.run("getComputedStyle(document.body).backgroundColor")
        await page.show_as(360, 640, dark=False)
        assert dark != await page.run("getComputedStyle(document.body).backgroundColor")
        assert [] == page.complaints


@asynchronous
async def test_clients_are_found_filtered_and_sorted(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker), browsing(tmp_path / "profile") as page:
        federation.start_agents(4)
        await federation.create(run_config(num_rounds=1, min_clients=4))
        await federation.finished()
        await page.open(asker.address)
        shown_clients = functools.partial("[...document.querySelectorAll('#clients tr[data-client]')]{}".format)
        await page.until(shown_clients(".length === 4"))
        await choose(page, "search", "CLIENT-2")
        await page.until(shown_clients(".length === 1"))
        assert "1 of 1 clients, 4 in total" == await page.run("document.getElementById('count').textContent")
        await choose(page, "search", "")
        await choose(page, "show", "away")
        await page.until(shown_clients(".length === 0"))
        await choose(page, "show", "all")
        await choose(page, "sort", "bytes")
        order = await page.run(shown_clients(".map(row => row.dataset.client)"))
        told = {c["client"]: c["bytes_up"] for c in (await asker.get(f"/api/runs/{RUN}"))["clients"]}
        assert sorted(told.values(), reverse=True) == [told[client] for client in order]


async def choose(page: Page, field: str, value: str) -> None:
    await page.run(f"document.getElementById({field!r}).value = {value!r}")
    await page.run(f"document.getElementById({field!r}).dispatchEvent(new Event('input'))")
