from itertools import pairwise

import pytest

from fedel.simulation.job import Evaluation
from fedel.strategies import build
from tests.simulation.fakes import play, run_config, slowed
from tests.simulation.history import run_rounds
from tests.strategies import fakes
from tests.strategies.fakes import fleet, same_bits


@pytest.mark.parametrize("strategy", ["fedavg", "fedel", "heterofl", "fiarse", "pyramidfl"])
def test_a_simulation_gives_what_the_strategies_give(strategy):
    """The reference plays rounds without roles, workers or clocks."""
    expected = run_rounds(build({"name": strategy}), 4, fleet(6), num_participants=4)
    assert same_bits(
        expected.model, play(run_config(strategy, num_rounds=4, num_participants=4), fleet(6)).model
    )


@pytest.mark.parametrize("num_participants", [0, 25, 10])
def test_the_run_sets_the_number_of_participants(num_participants):
    played = play(run_config("fedel", num_rounds=2, num_participants=num_participants), fleet(100))
    assert [num_participants or 100] * 2 == [record.num_updates for record in played.records]
    drawn = [{entry.client for entry in record.clients} for record in played.records]
    assert (num_participants == 0) == (drawn[0] == drawn[1])


def test_windows_slide_only_in_rounds_of_their_client():
    """A client that sits out a round goes on where it was (A5)."""
    trainers, last = slowed([1, *[4] * 6]), fakes.spec().num_blocks
    played = play(run_config("fedel", num_rounds=12, num_participants=4), trainers)
    for name in list(trainers)[1:]:
        entries = [e for record in played.records for e in record.clients if e.client == name]
        windows = [entry.window for entry in entries]
        assert 3 <= len(windows) < 12
        assert 1 == windows[0][0]
        for (end, front), (next_end, next_front) in pairwise(windows):
            if front == last:
                assert (1, windows[0][1]) == (next_end, next_front)
            else:
                assert front < next_front
                assert end <= next_end


def test_only_what_the_window_needs_is_sent_down():
    spec, played = fakes.spec(), play(run_config("fedel", num_rounds=1), slowed([1, 4]))
    for entry in played.records[0].clients:
        needed = spec.tensors_for(spec.exits_for(*entry.window))
        assert sum(spec.by_name[name].num_bytes for name in needed) == entry.bytes_down < spec.num_bytes


def test_only_what_changed_is_sent_down_again():
    played = play(run_config("fedel", num_rounds=4), slowed([1, 4]))
    everything = fakes.spec().num_bytes
    downs = [[entry.bytes_down for entry in record.clients] for record in played.records]
    assert max(max(down) for down in downs[1:]) < everything
    ups = [entry.bytes_up for record in played.records for entry in record.clients]
    assert 0 < min(ups) < max(ups) < everything


def test_a_client_that_was_away_gets_what_it_missed():
    played = play(run_config("fedavg", num_rounds=6, num_participants=2), fleet(5))
    trained = 4 * 285
    everything = 4 * sum(t.size for t in fakes.spec().tensors)
    met = set()
    for record in played.records:
        for entry in record.clients:
            assert (trained if entry.client in met else everything) == entry.bytes_down
            met.add(entry.client)


def test_an_update_that_diverged_is_left_out_and_named():
    class Diverged(fakes.FakeTrainer):
        def train(self, model, job):
            trained = super().train(model, job)
            for patch in trained.patches.values():
                patch.values[...] = float("nan")
            return trained

    trainers = fleet(3)
    bad = trainers["client-1"]
    trainers["client-1"] = Diverged(bad.data_seed, bad.num_samples, bad.profile, bad.classes)
    played = play(run_config("fedavg", num_rounds=2), trainers)
    assert ["client-1"] == list(played.records[0].refused)
    assert "diverged" in played.records[0].refused["client-1"]
    assert ["client-0", "client-2"] == [entry.client for entry in played.records[1].clients]
    assert "client-1" not in played.checkpoint.memories


def test_models_are_tested_every_nth_round():
    run = run_config("fedel", num_rounds=5, evaluate_every=2)
    played = play(run, fleet(3), evaluation=Evaluation(exits_every=4))
    assert [False, True, False, True, True] == [r.accuracy is not None for r in played.records]
    assert [3, 4] == [r.round for r in played.records if r.exit_accuracies is not None]
    assert fakes.spec().num_blocks == len(played.records[3].exit_accuracies)
    never = play(run_config("fedel", num_rounds=2, evaluate_every=0), fleet(3))
    assert [None, None] == [record.accuracy for record in never.records]


def test_measurements_of_the_machine_do_not_enter_the_run():
    for report in play(run_config("fedel"), fleet(4)).checkpoint.handover.reports.values():
        assert 0 == report.peak_memory_bytes
        assert 0 < report.train_seconds
