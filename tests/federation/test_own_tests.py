"""Each client tests on data that it holds out: the same numbers on devices and in the simulation."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig

from fedel.data.partition import PartitionConfig, hold_out, split
from fedel.errors import ConfigError
from fedel.job import RunConfig, Server
from fedel.records import RoundRecord
from fedel.simulation.job import SimulationConfig
from fedel.simulation.workers import OwnTest
from fedel.simulation.workload import TorchWorkload
from fedel.training import factory
from fedel.training.settings import DataPart, TrainerSettings
from tests.agents.stand_ins import running
from tests.federation.support import OWN, create_run, job_of, servers, watching
from tests.federation.trainers import clients_of
from tests.services.coordinator.support import asynchronous
from tests.simulation.history import play_run
from tests.training import toys

NUM_CLIENTS = 4
HELD = {f"client-{index}": 3 + index for index in range(NUM_CLIENTS)}


async def on_devices(folder: Path, job: RunConfig) -> list[RoundRecord]:
    trainers = clients_of(NUM_CLIENTS)
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(servers(folder))
        await create_run(made.address, "night", job)
        watch = await stack.enter_async_context(watching(made.address, "night"))
        for index, (name, trainer) in enumerate(trainers.items()):
            config = AgentConfig(
                made.address,
                name,
                folder / name,
                device_type=trainer.profile.device,
                data=DataPart(index, NUM_CLIENTS),
                evaluate=index == 0,
                code=OWN,
            )
            await stack.enter_async_context(running(Agent(config)))
        await watch.finished()
        return watch.records


@pytest.mark.parametrize(
    ("strategy", "server"), [("fedel", Server()), ("depthfl", Server(average=0.5))], ids=["fedel", "averaged"]
)
@asynchronous
async def test_devices_and_the_simulation_give_the_same(tmp_path: Path, strategy: str, server: Server) -> None:
    job = job_of({"name": strategy}, NUM_CLIENTS, 4, trainer="holding_out", evaluate_clients_every=2)
    job = replace(job, server=server)
    simulated = play_run(job, clients_of(NUM_CLIENTS), held_out=HELD)
    records = await on_devices(tmp_path, job)
    expected = [record.client_tests for record in simulated.records]
    assert expected == [record.client_tests for record in records]
    assert [None, NUM_CLIENTS, None, NUM_CLIENTS] == [
        tests.overall.num_clients if tests else None for tests in expected
    ]
    last = expected[-1]
    assert last is not None
    assert NUM_CLIENTS == len({score.accuracy for score in last.clients}), "each has data of its own"
    assert list(HELD.values()) == [score.num_samples for score in last.clients]


@asynchronous
async def test_one_that_fails_is_missing_and_trains_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"fails": "client-1"}
    job = job_of(
        {"name": "fedavg"}, NUM_CLIENTS, 2, trainer="holding_out", options=options, evaluate_clients_every=1
    )
    records = await on_devices(tmp_path, job)
    assert [(3, 1)] * 2 == [(r.client_tests.overall.num_clients, r.client_tests.num_missing) for r in records]  # type: ignore[union-attr]
    assert [NUM_CLIENTS] * 2 == [record.num_updates for record in records]
    assert "planted: no test today" in caplog.text


def test_torch_gives_a_device_the_bits_of_the_simulation() -> None:
    """Train on the same samples, and test on the same others."""
    job = RunConfig.parse(
        {
            "seed": 3,
            "workload": {"model": "tests.training.toys:make_model", "data": "tests.training.toys:make_data"},
            "work": {"batch_size": 4},
        }
    )
    data, model = toys.make_data(), toys.make_model()
    whole = split(data, PartitionConfig("iid", 3), seed=3)
    parts, held = zip(*(hold_out(part, 0.25, 3) for part in whole), strict=True)
    names = [f"client-{index}" for index in range(3)]
    tensors = {name: values + 0.01 for name, values in model.tensors().items()}
    workload = TorchWorkload(
        model, data, dict(zip(names, parts, strict=True)), {}, held_out=dict(zip(names, held, strict=True))
    )
    workload.prepare()
    for index, name in enumerate(names):
        part = DataPart(index, 3, "iid", seed=3, held_out=0.25)
        trainer, evaluator, own = factory.make_trainer(job, TrainerSettings(part, threads=1, evaluate=False))
        assert evaluator is None
        assert own is not None
        assert (len(parts[index]), len(held[index])) == (trainer.num_samples, own.num_samples)
        assert not np.intersect1d(parts[index], held[index]).size
        for test in (own.test, own.test.beside_training()):  # type: ignore[attr-defined]
            score = test(tensors, ())
            assert workload.test_own(tensors, OwnTest(name)) == (score.accuracy, score.loss)


def test_shares_and_rounds_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="held_out = 1: a share, at least 0 and below 1"):
        SimulationConfig.parse({"partition": {"held_out": 1.0}})
    with pytest.raises(ValueError, match=r"held_out = -0\.1"):
        DataPart(held_out=-0.1)
    with pytest.raises(ConfigError, match="evaluate_clients_every is a number of rounds"):
        RunConfig.parse({"rounds": {"evaluate_clients_every": -1}})


def test_a_record_of_before_has_none() -> None:
    table = json.loads(play_run(job_of({"name": "fedavg"}, 2, 1), clients_of(2)).records[0].to_json())
    del table["client_tests"]
    assert RoundRecord.from_json(json.dumps(table)).client_tests is None
