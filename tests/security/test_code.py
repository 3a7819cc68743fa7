"""Machines of different owners: each runs only the code of jobs that it allows, and the others go on."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as serve_aggregator
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.server import serve as serve_coordinator
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig

from fedel.desk.submit import control, create, follow, look, save_model
from fedel.errors import ServiceError
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


EVIL = """
from dataclasses import dataclass
from pathlib import Path
from fedel.strategies import FedAvg

Path({marker!r}).touch()

@dataclass(frozen=True)
class Mine(FedAvg):
    name = "mine"
"""


@pytest.fixture
def own_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with a method; the file that it leaves behind when somebody imports it."""
    marker = tmp_path / "imported"
    (tmp_path / "server_method.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "server_method", raising=False)
    return marker


@asynccontextmanager
async def two_servers(folder: Path, aggregator: Allowed, coordinator: Allowed) -> AsyncIterator[str]:
    settings = AggregatorConfig(listen="127.0.0.1:0", data_dir=folder / "aggregator", code=aggregator)
    async with serve_aggregator(settings) as (bulk, _):
        database = f"sqlite:///{folder / 'coordinator.db'}"
        config = CoordinatorConfig("127.0.0.1:0", None, (bulk,), database_url=database, code=coordinator)
        async with serve_coordinator(config) as (address, _):
            yield address


async def create_own(address: str, name: str = "server_method:Mine", run: str = "night") -> None:
    job = job_of({"name": name}, num_clients=1)
    spec = spec_of(scale_of(job))
    await create(address, run, job, spec, initial_model(spec))


MINE = Allowed(("server_method",))


@pytest.mark.parametrize(
    ("aggregator", "coordinator"), [(Allowed(), MINE), (MINE, Allowed())], ids=["aggregator", "coordinator"]
)
@asynchronous
async def test_a_server_runs_no_method_that_it_does_not_allow(
    tmp_path: Path, own_method: Path, aggregator: Allowed, coordinator: Allowed
) -> None:
    async with two_servers(tmp_path, aggregator, coordinator) as address:
        for name in ("server_method:Mine", "subprocess:Popen"):
            with pytest.raises(
                ServiceError, match=f"refused: .*does not allow .* of '{name.partition(':')[0]}'"
            ):
                await create_own(address, name, name.partition(":")[0])
            # The aggregators come first: what they allow they have imported.
            assert own_method.exists() == (aggregator is MINE)
        await create_own(address, "fedprox")


@asynchronous
async def test_servers_run_the_methods_they_allow(tmp_path: Path, own_method: Path) -> None:
    async with two_servers(tmp_path, MINE, MINE) as address:
        await create_own(address)
    assert own_method.exists()
    # Not allowed any more: nothing is lost, and the run goes on once it is allowed again.
    async with two_servers(tmp_path, Allowed(), Allowed()) as address:
        status = await look(address, "night")
        assert pb.RUN_PHASE_PAUSED == status.phase
        assert "does not allow jobs to run code of 'server_method'" in status.message
        with pytest.raises(ServiceError, match=r"cannot go on: .*start the coordinator again"):
            await control(address, "night", pb.RUN_ACTION_RESUME)
        with pytest.raises(ServiceError, match=r"is set aside: .*does not allow"):
            await save_model(address, "night", tmp_path / "model.safetensors")
    async with two_servers(tmp_path, MINE, MINE) as address:
        assert pb.RUN_PHASE_WAITING == (await control(address, "night", pb.RUN_ACTION_RESUME)).phase
        await save_model(address, "night", tmp_path / "model.safetensors")
