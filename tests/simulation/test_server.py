"""A run whose average is tested and kept, while its clients train the newest version."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedel.job import Server
from fedel.simulation.store import RunFolder
from fedel.strategies.server_steps import averages
from tests.simulation.fakes import FakeWorkload, play, run_config
from tests.strategies.fakes import fleet, same_bits


def averaged_run(**server):
    run = run_config({"name": "fedel", "damping": 0.5}, num_rounds=6, num_participants=4)
    return replace(run, server=Server(**server))


def loss_of(model):
    """As a fake test has it."""
    (sample,) = fleet(1).values()
    size = 40 / 8
    losses = [
        FakeWorkload({"one": sample}).test(model, type("Part", (), part))[0].loss_sum
        for part in ({"part": i, "num_parts": 8, "limit": 0, "each_exit": False} for i in range(8))
    ]
    return sum(losses) / (8 * size)


def test_the_average_is_tested_and_clients_train_the_plain_model():
    plain, averaged = play(averaged_run(), fleet(6)), play(averaged_run(average=0.75), fleet(6))
    assert same_bits(plain.model, averaged.model)
    tested = {**averaged.model, **averages(averaged.checkpoint.fold_state)}
    assert averaged.records[-1].test_loss == pytest.approx(loss_of(tested))
    assert plain.records[-1].test_loss == pytest.approx(loss_of(plain.model))
    assert plain.records[-1].test_loss != averaged.records[-1].test_loss
    assert plain.records[0].test_loss == averaged.records[0].test_loss  # there is one version to average


@pytest.mark.parametrize("stop_after", [1, 4])
def test_a_stopped_run_goes_on_with_its_average(stop_after, tmp_path):
    run = averaged_run(average=0.75, momentum=0.3)
    whole = play(run, fleet(6))
    play(run, fleet(6), folder=tmp_path / "run", stop_after=stop_after)
    resumed = play(run, fleet(6), folder=tmp_path / "run")
    assert same_bits(whole.model, resumed.model)
    assert same_bits(whole.checkpoint.fold_state, resumed.checkpoint.fold_state)
    assert whole.comparable() == resumed.comparable()


def test_the_model_that_is_kept_is_the_average(tmp_path):
    played = play(averaged_run(average=0.75), fleet(6), folder=tmp_path)
    RunFolder(tmp_path).keep("best.safetensors", played.checkpoint)
    kept = load_file(tmp_path / "best.safetensors")
    averaged = averages(played.checkpoint.fold_state)
    assert same_bits({**played.model, **averaged}, kept)
    assert any(not np.array_equal(kept[name], played.model[name]) for name in averaged)
