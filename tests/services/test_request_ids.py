"""One id in the lines of all processes that worked on a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fedel_aggregator.servicer import Aggregator

from fedel import request_id
from fedel.v1 import coordinator_pb2 as pb
from tests.federation.support import agents, create_run, job_of, servers, watching
from tests.services.coordinator.support import Federation, asynchronous, run_config
from tests.services.coordinator.test_other_round import copy_all, play_until_round, replace_by_copy, start


class Lines(logging.Handler):
    """The lines of all processes, which are one here: logger, message, request."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append((record.name, record.getMessage(), request_id.current()))

    def requests(self, logger: str, words: str) -> list[str]:
        return [request for name, said, request in self.all if name.startswith(logger) and words in said]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.setLevel(level)
    root.removeHandler(handler)


@asynchronous
async def test_what_a_person_asks_for_has_one_id_at_coordinator_and_aggregator(
    tmp_path: Path, lines: Lines
) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=6, evaluate_every=0))
        await play_until_round(federation, 1)
        copy_all(tmp_path)
        await start(federation)
        await play_until_round(federation, 4)
        replace_by_copy(tmp_path, "aggregator-0")
        await start(federation)
        await federation.status(lambda s: s.phase == pb.RUN_PHASE_PAUSED)
        first = lines.requests("fedel_coordinator.run", "is paused")
        assert first == lines.requests("fedel_services.errors", "refused: this aggregator is at round 1")
        assert first[0]
        request_id.begin("ada-7")
        await federation.control(pb.RUN_ACTION_RESUME)
        await federation.status(lambda s: s.phase == pb.RUN_PHASE_PAUSED)
        assert "ada-7" in lines.requests("fedel_coordinator.run", "is paused")
        assert "ada-7" in lines.requests("fedel_services.errors", "refused: this aggregator is at round 1")


def test_a_session_has_one_id_at_agent_coordinator_and_aggregator(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[str] = []
    get_model = Aggregator.GetModel

    async def noted(self: Aggregator, request: Any, context: Any) -> None:
        downloads.append(request_id.current())
        await get_model(self, request, context)

    monkeypatch.setattr(Aggregator, "GetModel", noted)
    job = job_of({"name": "fedel"}, num_clients=2, num_rounds=1)

    async def scenario() -> None:
        async with servers(tmp_path) as made:
            await create_run(made.address, "night-1", job)
            downloads.clear()
            async with agents(tmp_path, made.address, range(2), 2), watching(made.address, "night-1") as watch:
                await watch.finished()

    asyncio.run(scenario())
    begun = lines.requests("fedel_edge.session", "in session with the coordinator")
    assert 2 == len(set(begun))
    assert sorted(begun) == sorted(lines.requests("fedel_coordinator.run", " joined"))
    assert set(begun) == set(downloads)
