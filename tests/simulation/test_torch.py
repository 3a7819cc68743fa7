"""A real model: bits do not depend on workers or stops, and it learns."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedel.job import Server
from fedel.report import runs
from fedel.simulation import profiles, start, workload
from fedel.simulation.job import SimulationConfig
from fedel.simulation.workers import EvaluationPart
from fedel.simulation.workload import TorchWorkload
from fedel.training.factory import fresh_model, initial_model, make_data, make_model
from fedel.training.profile_io import load_profile, save_profile
from fedel.training.stacked import train_together
from tests.simulation import tiny
from tests.strategies.fakes import same_bits


@pytest.fixture
def job(tmp_path):
    def make(strategy="fedel", **rounds):
        table = {
            "seed": 3,
            "strategy": strategy if isinstance(strategy, dict) else {"name": strategy},
            "workload": {"model": "tests.simulation.tiny:model", "data": "tests.simulation.tiny:data"},
            "rounds": {"num_rounds": 3, "num_participants": 4, **rounds},
            "work": {"num_steps": 5, "batch_size": 8, "lr": 0.05},
            "partition": {"num_clients": 8, "alpha": 0.5, "min_size": 4},
            "fleet": {"base": str(tmp_path / "base.json")},
            "evaluation": {"exits_every": 2},
        }
        made = SimulationConfig.parse(table)
        save_profile(tiny.profile(initial_model(made.run)[0]), tmp_path / "base.json")
        return made

    return make


def played(job, path, stop_after=None, **how):
    with start.session(job, path, **how) as session:
        if stop_after is not None:
            while session.simulation.checkpoint.handover.round_num < stop_after:
                record = session.simulation.play()
                session.folder.commit(session.simulation.checkpoint, record)
            return None
        return start.play_all(session, lambda record: None)


def rounds_of(path):
    return [replace(record, wall_seconds=None) for record in runs.load(path).rounds]


def stored_result(path):
    """What a repetition has in common; the directory and the wall clock are its own."""
    result = json.loads((path / "result.json").read_text())
    return {key: value for key, value in result.items() if key not in ("run", "wall_seconds")}


@pytest.mark.parametrize("strategy", ["fedel", "heterofl"])
def test_workers_and_stops_do_not_change_a_bit(strategy, job, tmp_path):
    wanted = job(strategy)
    played(wanted, tmp_path / "serial", executor="serial")
    played(wanted, tmp_path / "two", executor="processes", num_workers=2)
    played(wanted, tmp_path / "stopped", stop_after=2, executor="serial")
    played(wanted, tmp_path / "stopped", resume=True, executor="processes", num_workers=3)
    for other in ("two", "stopped"):
        one, same = (load_file(tmp_path / name / "model.safetensors") for name in ("serial", other))
        assert same_bits(one, same)
        assert rounds_of(tmp_path / "serial") == rounds_of(tmp_path / other)
        assert stored_result(tmp_path / "serial") == stored_result(tmp_path / other)


@pytest.mark.parametrize("strategy", ["fedavg", "fedel", "heterofl", "depthfl"])
def test_fast_differs_from_exact_by_rounding_only(strategy, job, tmp_path):
    exact = job(strategy, num_rounds=5)
    played(exact, tmp_path / "exact", executor="serial")
    played(replace(exact, compute="fast"), tmp_path / "fast", executor="serial")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("exact", "fast"))
    differences = [np.abs(one[name] - other[name]).max() for name in one]
    assert 0 < max(differences) < 1e-4
    # The gradient of a bias before batch norm is rounding and nothing else: so is its importance.
    noise = {"blocks.block2.0.bias"}
    chosen = [
        [set(c.selected) - noise for record in runs.load(tmp_path / name).rounds for c in record.clients]
        for name in ("exact", "fast")
    ]
    assert chosen[0] == chosen[1]


def test_fast_trains_clients_side_by_side_whatever_the_workers(job, tmp_path, monkeypatch):
    groups = []

    def counted(requests):
        groups.append(len(requests))
        return train_together(requests)

    monkeypatch.setattr(workload, "train_together", counted)
    fast = replace(job("fedavg", num_rounds=2, num_participants=8), compute="fast")
    played(fast, tmp_path / "serial", executor="serial")
    assert groups
    assert max(groups) > 2
    played(fast, tmp_path / "two", executor="processes", num_workers=2)
    assert same_bits(*(load_file(tmp_path / name / "model.safetensors") for name in ("serial", "two")))


def test_a_run_learns_and_leaves_everything_in_its_directory(job, tmp_path):
    wanted = job(num_rounds=12, keep_every=5)
    result = played(wanted, tmp_path / "run", executor="serial")
    assert 0.6 < result.best_accuracy
    assert {"config.toml", "result.json", "rounds.jsonl", "model.safetensors", "best.safetensors"} <= {
        file.name for file in (tmp_path / "run").iterdir()
    }
    assert {"model-5.safetensors", "model-10.safetensors"} <= {
        f.name for f in (tmp_path / "run").glob("model-*")
    }
    stored = runs.load(tmp_path / "run")
    assert result == stored.result
    assert wanted == SimulationConfig.parse(stored.settings)
    assert sum(record.latency_seconds for record in stored.rounds) == result.virtual_seconds
    assert [t.name for t in initial_model(wanted.run)[0].weights] == list(result.tensors)
    assert {"fedel", "python", "numpy", "torch"} == result.versions.keys()
    assert all(client.deviation_mean is not None for client in result.clients.values())


def test_the_result_says_that_an_average_was_tested(job, tmp_path):
    wanted = job(num_rounds=2)
    averaged = replace(wanted, run=replace(wanted.run, server=Server(average=0.75)))
    result = played(averaged, tmp_path / "run", executor="processes", num_workers=2)
    assert (0.75, 0.75) == (result.average, runs.load(tmp_path / "run").result.average)
    # A test of the file gives what the run says about itself.
    kept = load_file(tmp_path / "run" / "model.safetensors")
    data = make_data(averaged.run)
    workload = TorchWorkload(fresh_model(averaged.run, data), data, {}, {}, "cpu")
    workload.prepare()
    (tally,) = workload.test(kept, EvaluationPart(0, 1, 0))
    assert result.accuracy == tally.num_correct / tally.num_targets


def test_a_finished_run_is_resumed_by_adding_rounds(job, tmp_path):
    played(job(num_rounds=2, evaluate_every=1), tmp_path / "run", executor="serial")
    played(job(num_rounds=4, evaluate_every=1), tmp_path / "run", resume=True, executor="serial")
    played(job(num_rounds=4, evaluate_every=1), tmp_path / "whole", executor="serial")
    assert same_bits(*(load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole")))


def test_the_first_model_is_that_of_a_federation(job):
    run = job().run
    assert same_bits(initial_model(run)[1], fresh_model(run, make_data(run)).tensors())


def test_the_test_set_is_counted_once_for_any_number_of_parts(job):
    run = job().run
    data = make_data(run)
    model = make_model(run, data)
    workload = TorchWorkload(model, data, {}, {})
    tensors = model.tensors()

    def total(num_parts, limit=0):
        tallies = [workload.test(tensors, EvaluationPart(i, num_parts, limit))[0] for i in range(num_parts)]
        return sum(m.num_correct for m in tallies), sum(m.num_targets for m in tallies)

    with torch.no_grad():
        x, y = next(iter(data.test_batches(len(data.test))))
        right = int((model.eval()(torch.from_numpy(x)).argmax(-1).numpy() == y).sum())
    assert (right, 61) == total(1) == total(8)
    assert 20 == total(3, limit=20)[1]


def test_depthfl_is_judged_by_the_exits_it_trains(job):
    run = job("depthfl").run
    data = make_data(run)
    model = make_model(run, data)
    from fedel.strategies.depthfl import depths

    x, y = next(iter(data.test_batches(len(data.test))))
    with torch.no_grad():
        logits = model.eval().all_exits(torch.from_numpy(x))
        mean = torch.stack([logits[d - 1] for d in depths(model.spec)]).mean(0)
    right = int((mean.argmax(-1).numpy() == y).sum())
    workload = TorchWorkload(model, data, {}, {})
    assert right == workload.test(model.tensors(), EvaluationPart(0, 1, 0, depths(model.spec)))[0].num_correct


def test_a_client_keeps_its_trainer_and_all_share_a_model(job):
    run = job().run
    data = make_data(run)
    model = make_model(run, data)
    timing = tiny.profile(model.spec)
    parts = {"a": np.arange(10), "b": np.arange(10, 30)}
    workload = TorchWorkload(model, data, parts, dict.fromkeys(parts, timing))
    assert workload.trainer("a") is workload.trainer("a")
    assert workload.trainer("a").model is workload.trainer("b").model
    assert (10, 20) == (workload.trainer("a").num_samples, workload.trainer("b").num_samples)


def test_a_profile_is_measured_once_and_kept(job, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDEL_PROFILES", str(tmp_path / "profiles"))
    run = job().run
    data = make_data(run)
    model = make_model(run, data)
    first = profiles.base_profile("measured", run, model, data)
    assert first == profiles.base_profile("auto", run, model, data)
    (kept,) = (tmp_path / "profiles").iterdir()
    assert first == load_profile(kept, model.spec)
    assert list(profiles.WIDTHS) == [width.width for width in first.widths]
