"""A federation whose servers show themselves over HTTP, and a client that asks them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.services.coordinator.support import STEP_SECONDS, Federation

TOKEN = "open-sesame"
ACCURACIES = {version: 0.1 * version for version in range(10)}


@asynccontextmanager
async def shown(folder: Path, **settings: Any) -> AsyncIterator[tuple[Federation, Asker]]:
    """A federation without agents, and somebody who asks its coordinator over HTTP."""
    port_file = folder / "http.address"
    settings = {"http": "127.0.0.1:0", "http_port_file": port_file, "runs_dir": folder / "runs"} | settings
    async with Federation(folder, **settings) as federation, aiohttp.ClientSession() as session:
        yield federation, Asker(session, port_file)


class Asker:
    def __init__(self, session: aiohttp.ClientSession, port_file: Path) -> None:
        self._session, self._port_file = session, port_file

    @property
    def address(self) -> str:
        return f"http://{self._port_file.read_text()}"

    async def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self._session.request(method, self.address + path, headers=headers) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> Any:
        status, found = await self.ask(path)
        assert 200 == status, found
        return found

    async def raw(self, path: str) -> tuple[aiohttp.ClientResponse, str]:
        async with self._session.get(self.address + path) as answer:
            return answer, await answer.text()

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """Every sample by its name and the values of its labels, sorted by label."""
        return samples((await self.raw("/metrics"))[1])

    @asynccontextmanager
    async def events(self, run: str, **headers: str) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        """The kinds and data of the run's server-sent events."""
        async with self._session.get(f"{self.address}/api/runs/{run}/events", headers=headers) as answer:
            assert "text/event-stream" == answer.content_type
            yield _events(answer)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    kind = ""
    while line := await asyncio.wait_for(answer.content.readline(), STEP_SECONDS):
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (s.name, *(value for _, value in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
