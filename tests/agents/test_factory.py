"""The real trainer behind an agent: torch on a small problem."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedel.errors import ProfileError
from fedel.job import RunConfig
from fedel.seeds import derive
from fedel.strategies.depthfl import DepthFL, depths
from fedel.training import factory
from fedel.training.profile_io import save_profile
from fedel.training.settings import DataPart, TrainerSettings
from fedel.types import LocalWork, Role, TrainSpec
from fedel.v1 import coordinator_pb2
from fedel.wire.codec import report_from_pb
from tests.agents.stand_ins import RUN, federation, running, task_of
from tests.strategies.fakes import same_bits
from tests.training.toys import make_model

TOYS = {"model": "tests.training.toys:make_model", "data": "tests.training.toys:make_data"}
JOB = RunConfig.parse(
    {"workload": TOYS, "strategy": {"name": "fedavg"}, "work": {"num_steps": 3, "batch_size": 8}}
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Measuring is quicker; batch sizes of the measurements."""
    calls: list[int] = []
    real = factory.profile

    def quick(model, batch, work, device, **options):  # type: ignore[no-untyped-def]
        calls.append(len(batch[0]))
        return real(model, batch, work, device, rounds=1, **options)

    monkeypatch.setattr(factory, "profile", quick)
    return calls


def test_profile_is_measured_once_per_model_batch_and_widths(tmp_path: Path, measured: list[int]) -> None:
    settings = TrainerSettings(cache_dir=tmp_path, threads=1)
    first, *_ = factory.make_trainer(JOB, settings)
    again, *_ = factory.make_trainer(JOB, settings)
    assert [8] == measured
    assert first.profile == again.profile
    factory.make_trainer(replace(JOB, work=LocalWork(num_steps=3, batch_size=4)), settings)
    assert [8, 4] == measured
    narrow, *_ = factory.make_trainer(
        replace(JOB, strategy={"name": "fedprox", "base": {"name": "heterofl", "widths": [1.0, 0.5]}}), settings
    )
    assert [8, 4, 8] == measured
    assert [0.5] == [w.width for w in narrow.profile.widths]
    assert 3 == len(list(tmp_path.glob("profile-*.json")))


def test_damaged_profile_is_measured_again(
    tmp_path: Path, measured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    settings = TrainerSettings(cache_dir=tmp_path, threads=1)
    factory.make_trainer(JOB, settings)
    (kept,) = tmp_path.glob("profile-*.json")
    kept.write_text("{")
    factory.make_trainer(JOB, settings)
    assert [8, 8] == measured
    assert "is damaged" in caplog.text


def test_given_profile(tmp_path: Path, measured: list[int]) -> None:
    trainer, *_ = factory.make_trainer(JOB, TrainerSettings(threads=1))
    given = replace(trainer.profile, device="given")
    save_profile(given, tmp_path / "given.json")
    used, *_ = factory.make_trainer(JOB, TrainerSettings(profile=tmp_path / "given.json"))
    assert "given" == used.profile.device
    save_profile(replace(given, tensors=given.tensors[1:]), tmp_path / "other.json")
    with pytest.raises(ProfileError, match="another model"):
        factory.make_trainer(JOB, TrainerSettings(profile=tmp_path / "other.json"))
    assert [8] == measured


@pytest.mark.parametrize("method", ["dirichlet", "dirichlet-equal", "iid"])
def test_parts_make_up_the_training_set(method: str) -> None:
    data = factory.make_data(JOB)
    parts = [factory.part_of(data, DataPart(i, 3, method, alpha=1.0)) for i in range(3)]
    assert list(range(len(data.train))) == sorted(np.concatenate(parts).tolist())
    whole = factory.part_of(data, DataPart())
    assert len(data.train) == len(whole)


def test_first_model_depends_only_on_the_seed() -> None:
    job = replace(JOB, workload=replace(JOB.workload, model="cnn", model_options={"width": 0.25}))
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    spec, first = factory.initial_model(job)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert same_bits(first, factory.initial_model(job)[1])
    assert not same_bits(first, factory.initial_model(replace(job, seed=1))[1])
    torch.manual_seed(derive(0, "initial model"))
    assert same_bits(first, factory.make_model(job, factory.make_data(job)).tensors())
    assert spec.digest == factory.make_model(job, factory.make_data(job)).spec.digest


def test_a_test_beside_a_training_changes_no_bit(measured: list[int]) -> None:
    trainer, evaluator, _ = factory.make_trainer(JOB, TrainerSettings(threads=1))
    assert isinstance(evaluator, factory.ModelTest)
    model = make_model(norm=False).tensors()
    other = {name: values + 1 for name, values in model.items()}
    everything = frozenset(t.name for t in trainer.spec.weights)
    work, exits = LocalWork(num_steps=200, batch_size=8, lr=0.05), (trainer.spec.num_blocks,)
    spec = TrainSpec(work, 200, 1, everything, exits)
    alone, score = trainer.train(model, spec), evaluator(other, ())
    beside = evaluator.beside_training()
    assert beside.model is not evaluator.model
    begun, ended, scores = threading.Event(), threading.Event(), []

    def test() -> None:
        while not ended.is_set():
            scores.append(beside(other, ()))
            begun.set()

    thread = threading.Thread(target=test)
    thread.start()
    begun.wait(30)
    together = trainer.train(model, spec)
    ended.set()
    thread.join()
    assert {score} == set(scores)
    assert all(np.array_equal(p.values, together.patches[n].values) for n, p in alone.patches.items())


def test_agent_trains_with_torch(tmp_path: Path, measured: list[int]) -> None:
    spec, model = make_model().spec, make_model().tensors()

    async def scenario() -> tuple[float, float, float]:
        async with federation(tmp_path / "state") as fed:
            fed.aggregator.versions = {0: model}
            async with running(fed.agent(threads=1, data=DataPart(1, 3, "iid"))):
                await fed.coordinator.until("hello")
                fed.offer(json.dumps(JOB.table()), model_digest=spec.digest)
                join = await fed.coordinator.until("join")
                assert 32 == join.num_samples
                order = task_of(0)
                order.work.lr, order.work.num_steps = 0.05, 30
                fed.coordinator.push(task=order)
                report = report_from_pb((await fed.done(0)).report)
                (header,) = fed.aggregator.headers.values()
                assert {t.name for t in spec.weights} == {entry.name for entry in header.tensors}
                scores = []
                for version in (0, 1):
                    fed.aggregator.versions[1] = {**model, **uploaded(fed.aggregator.payloads, header)}
                    fed.coordinator.push(
                        evaluate=coordinator_pb2.EvaluationTask(run=RUN, model_version=version)
                    )
                    scores.append((await fed.coordinator.until("evaluation", version + 1)).loss)
        return report.train_seconds, scores[0], scores[1]

    seconds, before, after = asyncio.run(scenario())
    assert seconds > 0
    assert after < before


def uploaded(payloads, header):  # type: ignore[no-untyped-def]
    data, tensors = bytes(payloads[header.digest]), {}
    for entry in header.tensors:
        values, data = data[: entry.num_bytes], data[entry.num_bytes :]
        tensors[entry.name] = np.frombuffer(values, np.float32).reshape(tuple(entry.shape))
    return tensors


def test_ensemble_of_the_exits_that_depthfl_trains(measured: list[int]) -> None:
    trainer, judge, _ = factory.make_trainer(JOB, TrainerSettings(threads=1))
    assert judge is not None
    _, tensors = factory.initial_model(JOB)
    untrained = [
        t.name for t in trainer.spec.tensors if t.role is Role.EXIT and t.block not in depths(trainer.spec)
    ]
    assert untrained
    disturbed = {n: v + 100 if n in untrained else v for n, v in tensors.items()}
    average = DepthFL().exits_to_average(trainer.spec)
    assert judge(tensors, average).loss == judge(disturbed, average).loss != judge(tensors, ()).loss
