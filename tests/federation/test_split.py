"""The job hands out the parts of one common data set: all agents have the same configuration."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig

from fedel.data.partition import METHODS
from fedel.desk.submit import create, list_agents
from fedel.errors import ConfigError
from fedel.job import RunConfig, Split
from fedel.plugins import Allowed
from fedel.simulation.job import SimulationConfig
from fedel.training.settings import DataPart, Evaluator, TrainerSettings
from fedel.types import Trainer
from tests.agents.stand_ins import running
from tests.federation.support import job_of, servers, watching
from tests.federation.trainers import clients_of, spec_of
from tests.services.coordinator.support import asynchronous
from tests.strategies.fakes import initial_model

SEEN: dict[str, DataPart] = {}


def noting(run: RunConfig, settings: TrainerSettings) -> tuple[Trainer, Evaluator | None]:
    """The trainer of the part that this client was given."""
    assert settings.cache_dir is not None
    SEEN[settings.cache_dir.parent.name] = settings.data
    return clients_of(settings.data.of)[f"client-{settings.data.index}"], None


async def _connected(address: str, number: int) -> None:
    while len((await list_agents(address))[0]) < number:
        await asyncio.sleep(0.05)


@asynchronous
async def test_each_agent_trains_on_the_part_of_its_name(tmp_path: Path) -> None:
    SEEN.clear()
    split = Split(("pi-2", "pi-9", "pi-1"), "iid", seed=4)
    names = ("pi-1", "pi-2", "pi-3", "pi-9")
    job = replace(job_of({"name": "fedavg"}, 3), split=split, trainer="tests.federation.test_split:noting")
    async with servers(tmp_path) as made, AsyncExitStack() as stack:
        for name in names:
            config = AgentConfig(made.address, name, tmp_path / name, code=Allowed(("tests",)))
            await stack.enter_async_context(running(Agent(replace(config, data=DataPart(held_out=0.25)))))
        await asyncio.wait_for(_connected(made.address, len(names)), 60)
        await create(made.address, "night", job, spec_of(), initial_model(spec_of()))
        async with watching(made.address, "night") as watch:
            await watch.finished()
        assert [["pi-1", "pi-2", "pi-9"]] * 3 == [sorted(counted) for counted in watch.counted]
    assert {"pi-2": 0, "pi-9": 1, "pi-1": 2} == {name: part.index for name, part in SEEN.items()}
    part = DataPart(1, 3, "iid", seed=4, held_out=0.25)
    assert part == SEEN["pi-9"], "what is the device's own stays"


def test_a_job_without_a_split_is_as_before() -> None:
    """Agents of earlier versions take it, and simulations keep the names of their runs."""
    assert "split" not in RunConfig().table()
    with_split = RunConfig(split=Split(("a", "b")))
    assert with_split == RunConfig.parse(with_split.table_to_send())
    assert "split" not in SimulationConfig(with_split).table()


def test_what_is_no_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="each name once"):
        RunConfig.parse({"split": {"clients": ["a", "a"]}})
    with pytest.raises(ConfigError, match="dirichlet-equal"):
        RunConfig.parse({"split": {"clients": ["a"], "method": METHODS[0] + "s"}})
