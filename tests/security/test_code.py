"""Devices of different owners: one that does not allow the code of a job stays out, and the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig

from fedel.cli.submit import create, follow
from fedel.plugins import Allowed
from fedel.training.settings import DataPart
from fedel.v1 import coordinator_pb2 as pb
from tests.agents.stand_ins import running
from tests.federation.support import job_of, servers
from tests.federation.trainers import scale_of, spec_of
from tests.services.coordinator.support import asynchronous
from tests.strategies.fakes import initial_model


@asynchronous
async def test_one_device_refuses_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = job_of({"name": "fedel"}, num_clients=1, num_rounds=2)
    spec = spec_of(scale_of(job))
    async with servers(tmp_path) as made:
        agents = [
            Agent(AgentConfig(made.address, name, tmp_path / name, data=DataPart(0, 1), code=code))
            for name, code in (("open", Allowed(("tests.federation.trainers:uneven",))), ("strict", Allowed()))
        ]
        async with running(agents[0]), running(agents[1]):
            await create(made.address, "night", job, spec, initial_model(spec))
            last = await follow(made.address, "night", lambda _: None)
    assert (pb.RUN_PHASE_FINISHED, 2) == (last.phase, last.model_version), last.message
    assert [2, 0] == [agent.counts["done"] for agent in agents]
    assert "does not allow jobs to run code of 'tests.federation.trainers'" in caplog.text
