"""The list of agents over HTTP and on the live page, with and without a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from fedel_coordinator.sessions import Device

from fedel.wire.protocol import PROTOCOL
from tests.services.coordinator.support import Federation, asynchronous, run_config, trainers
from tests.web.browser import browsing, program
from tests.web.support import shown

DEVICE = Device("jetson-orin-nano", 8_000_000_000, "0.1.0")
ROWS = "document.querySelectorAll('#agents tbody tr')"


def add(federation: Federation, name: str, **labels: str) -> None:
    federation.coordinator.fleet.opened(name, DEVICE, labels, PROTOCOL)


@asynchronous
async def test_agents_as_json(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        assert ([], None) == ((found := await asker.get("/api/agents"))["agents"], found["next"])
        for name in ("b", "a", "c"):
            add(federation, name, site=name)
        federation.coordinator.fleet.failed("b", "night", 2, "boom", "Traceback\nboom")
        found = await asker.get("/api/agents?limit=2")
        assert (["a", "b"], "b") == ([agent["name"] for agent in found["agents"]], found["next"])
        error = {"run": "night", "round": 2, "message": "boom", "trace": ""}
        assert error.items() <= found["agents"][1]["last_error"].items()
        assert {"state": "away", "memory_bytes": 8_000_000_000, "certificate_end": None}.items() <= found[
            "agents"
        ][0].items()
        found = await asker.get("/api/agents?after=b")
        assert (["c"], None) == ([agent["name"] for agent in found["agents"]], found["next"])
        assert ["b"] == [agent["name"] for agent in (await asker.get("/api/agents?selector=site=b"))["agents"]]
        assert "Traceback\nboom" == (await asker.get("/api/agents/b"))["last_error"]["trace"]
        status, answer = await asker.ask("/api/agents/nobody")
        assert (404, True) == (status, "/api/agents lists all agents" in answer["error"])
        status, answer = await asker.ask("/api/agents?selector=site=")
        assert (400, True) == (status, "is no condition" in answer["error"])


@pytest.mark.skipif(program() is None, reason="Chromium is missing: apt-get install chromium")
@asynchronous
async def test_the_page_lists_agents_without_a_run(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker), browsing(tmp_path / "profile") as page:
        await page.show_as(360, 640)
        await page.open(asker.address)
        await page.until("!document.getElementById('fleet').hidden")
        assert "none has connected yet" == await page.run("document.getElementById('fleet-count').textContent")
        evil = "<img src=x onerror=document.title='bad'>"
        for number in range(60):
            add(federation, f"agent-{number:02}", site="roof" if number % 2 else "lab")
        add(federation, evil)
        federation.coordinator.fleet.failed("agent-07", "night", 2, evil, "Traceback\n  in train\nboom")
        await page.until(f"{ROWS}.length === 50")
        await page.run("document.getElementById('fleet-more').click()")
        await page.until(f"{ROWS}.length === 61")
        await page.run(
            "document.getElementById('fleet-show').value = 'error',"
            "document.getElementById('fleet-show').dispatchEvent(new Event('input'))"
        )
        await page.until(f"{ROWS}.length === 1")
        await page.run("document.querySelector('#agents button').click()")
        assert "Traceback\n  in train\nboom" == await page.until(
            "document.querySelector('#agents pre')?.textContent"
        )
        assert await page.run("document.documentElement.scrollWidth") <= 360, "nothing is wider than the phone"
        assert "bad" != await page.run("document.title")
        assert [] == page.complaints


@pytest.mark.skipif(program() is None, reason="Chromium is missing: apt-get install chromium")
@asynchronous
async def test_a_client_that_fails_is_named_in_its_row_with_the_reason(tmp_path: Path) -> None:
    cell = "document.querySelector('tr[data-client=\"client-1\"] .budget-cell')?.textContent"
    async with shown(tmp_path) as (federation, asker), browsing(tmp_path / "profile") as page:
        await page.show_as(360, 640)
        federation.agent("client-0", trainers()["client-0"])
        federation.agent("client-1", trainers()["client-1"]).script = dict.fromkeys(range(500), "fail")
        await federation.create(run_config(num_rounds=500, min_clients=2, evaluate_every=0))
        await page.open(asker.address)
        assert "out of memory" in await page.until(f"{cell}?.includes('out of memory') && {cell}")
        await page.run(
            "document.getElementById('show').value = 'failed',"
            "document.getElementById('show').dispatchEvent(new Event('input'))"
        )
        await page.until("document.querySelectorAll('#clients tbody tr').length === 1")
        await page.until("/\\(\\d+ times\\)/.test(document.querySelector('#log li')?.textContent)")
        await page.until("document.getElementById('fleet-count').textContent.includes('1 with an error')")
        assert await page.run("document.documentElement.scrollWidth") <= 360, "nothing is wider than the phone"
        assert [] == page.complaints
        clients = (await asker.get("/api/runs"))["runs"]
        (row,) = [
            each
            for each in (await asker.get(f"/api/runs/{clients[0]['run']}"))["clients"]
            if each["client"] == "client-1"
        ]
        assert "out of memory" in row["problem"]
