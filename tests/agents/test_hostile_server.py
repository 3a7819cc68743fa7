"""A coordinator or an aggregator that is broken, or means harm: the agent says no and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedel.job import RunConfig
from fedel.plugins import Allowed
from tests.agents.stand_ins import Federation, run_scenario, running


def job(**changes: Any) -> str:
    return json.dumps(RunConfig.parse(changes).table())


@pytest.mark.parametrize("place", ["data", "model", "trainer", "strategy"])
def test_a_job_cannot_run_any_command(tmp_path: Path, place: str) -> None:
    mark = tmp_path / "was-here"
    options = {"args": ["touch", str(mark)]}
    tables: dict[str, dict[str, Any]] = {
        "data": {"workload": {"data": "subprocess:run", "data_options": options}},
        "model": {"workload": {"data": "digits", "model": "subprocess:run", "model_options": options}},
        "trainer": {"trainer": "subprocess:run"},
        "strategy": {"strategy": {"name": "subprocess:Popen"}, "trainer": "tests.agents.trainers:fake"},
    }

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent(code=Allowed(("tests.agents.trainers:fake",)))):
            await fed.coordinator.until("hello")
            fed.offer(job(**tables[place]))
            message = (await fed.coordinator.until("failed")).message
            assert "does not allow jobs to run code of 'subprocess'" in message
            assert "`allow` in the section [code]" in message
            await fed.joined()

    run_scenario(tmp_path / "state", scenario)
    assert not mark.exists()
