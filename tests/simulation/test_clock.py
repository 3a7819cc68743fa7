"""The virtual clock by numbers worked out by hand on the fake model (its profile is in tests/strategies/fakes).

Kernels have 12, 24, 36, 48, 64 and 40 values, vectors 4, 6 + 6 + 6, 6, 8, 8 and 5; updating costs a millisecond
a value, passing a kernel half of that, but nobody passes the first one: backward 0.273 + 0.112 - 0.006 =
0.379 s. Forward 0.042 s, 1 ms for the last exit and 1 ms on top.
"""

import pytest

from fedel.simulation import clock
from fedel.simulation.conditions import Faults, Link
from fedel.types import Report, StepCost
from tests.simulation.fakes import play, run_config, slowed
from tests.strategies import fakes

BACKWARD, TRAIN, STEPS = 0.379, 0.423, 4
T_TH = STEPS * BACKWARD
FLEET = (1, 2, 3, 4)


def seconds_of(record, clock_name="backward"):
    return [entry.clock_seconds[clock_name] for entry in record.clients]


def first_round(strategy, **options):
    return play(run_config(strategy, num_rounds=1), slowed(FLEET), **options).records[0]


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fednova"])
def test_full_training_takes_longer_in_proportion_to_slowness(strategy):
    record = first_round(strategy)
    assert pytest.approx([s * STEPS * BACKWARD for s in FLEET]) == seconds_of(record)
    assert pytest.approx([s * STEPS * TRAIN for s in FLEET]) == seconds_of(record, "train")
    assert pytest.approx(4 * T_TH) == record.latency_seconds
    assert pytest.approx({"backward": 6.064, "train": 6.768}) == record.clock_seconds
    assert pytest.approx([0, 1, 2, 3]) == [entry.deviation for entry in record.clients]


def test_the_other_clock_decides_if_it_is_chosen():
    record = first_round("fedavg", scope="train")
    assert "train" == record.scope
    assert pytest.approx(6.768) == record.latency_seconds
    assert pytest.approx({"backward": 6.064, "train": 6.768}) == record.clock_seconds
    assert pytest.approx([0, 1, 2, 3]) == [entry.deviation for entry in record.clients]


def test_heterofl_takes_the_widest_model_that_fits():
    # Widths 1, 0.7, 0.5, 0.5: without measured widths a step costs their square.
    seconds = [T_TH, 2 * 0.49 * T_TH, 3 * 0.25 * T_TH, 4 * 0.25 * T_TH]
    record = first_round("heterofl")
    assert pytest.approx(seconds) == seconds_of(record)
    assert pytest.approx(T_TH) == record.latency_seconds


def test_depthfl_takes_the_deepest_prefix_that_fits_with_its_exits():
    # The fastest trains everything through the exits at 2, 4 and 6, but nothing needs the first tensor's
    # input gradient: 0.385 - 0.006 + 2 * 0.002. The others train two blocks: 0.058 + 0.018 - 0.006 + 0.002.
    record = first_round("depthfl")
    assert pytest.approx([4 * 0.383, *(s * 4 * 0.072 for s in (2, 3, 4))]) == seconds_of(record)
    assert pytest.approx(1.532) == record.latency_seconds


def test_timelyfl_fills_an_interval_that_half_of_the_devices_keep():
    # T_k = 3.032: two passes, one, then blocks 4 to 6 (0.225) and 5 to 6 (0.137).
    record = first_round("timelyfl")
    assert pytest.approx([3.032, 3.032, 3 * 4 * 0.225, 4 * 4 * 0.137]) == seconds_of(record)
    assert pytest.approx(3.032) == record.latency_seconds
    assert pytest.approx(1.1 * 3.032) == record.deadline_seconds


def test_pyramidfl_lets_fast_devices_train_until_the_slowest_is_done():
    record = first_round("pyramidfl")
    assert [16, 8, 5, 4] == [entry.num_steps for entry in record.clients]
    assert pytest.approx([16 * BACKWARD, 8 * 2 * BACKWARD, 5 * 3 * BACKWARD, 4 * 4 * BACKWARD]) == seconds_of(
        record
    )
    assert pytest.approx(4 * T_TH) == record.latency_seconds


@pytest.mark.parametrize(("kind", "round_seconds"), [("honest", 4 * T_TH), ("optimistic", T_TH)])
def test_fiarse_has_an_honest_and_an_optimistic_clock(kind, round_seconds):
    record = first_round({"name": "fiarse", "clock": kind})
    assert pytest.approx(round_seconds) == record.latency_seconds


@pytest.mark.parametrize("strategy", ["fedel", "elastictrainer"])
@pytest.mark.parametrize("scope", ["backward", "train"])
def test_elastic_methods_pay_for_their_selection_and_the_probe(strategy, scope):
    record = first_round({"name": strategy, "budget_scope": scope, "steps": "plan"})
    spec = fakes.spec()
    for entry, slowness in zip(record.clients, FLEET, strict=True):
        profile = fakes.profile(1)
        end, front = entry.window
        window = [t for t in profile.tensors if end <= t.block <= front]
        exit_forward, exit_backward = (0.001, 0.002) if front < spec.num_blocks else (0.001, 0.0)
        forward = sum(0.002 * b for b in range(1, front + 1)) + exit_forward + 0.001

        def chain(names, window=window, extra=exit_backward):
            shallowest = min(i for i, t in enumerate(window) if t.name in names)
            through = sum(t.grad_seconds for t in window[shallowest + 1 :])
            return extra + through + sum(t.update_seconds for t in window if t.name in names)

        step, probe = chain(set(entry.selected)), chain({t.name for t in window})
        expected = {
            "backward": slowness * (STEPS * step + 2 * probe),
            "train": slowness * (STEPS * (forward + step) + 2 * (forward + probe)),
        }
        assert pytest.approx(expected) == entry.clock_seconds
        assert pytest.approx(expected[scope]) == entry.train_seconds
    assert max(entry.train_seconds for entry in record.clients) == record.latency_seconds


def test_a_step_is_paid_for_each_time_and_a_probe_once():
    report = Report("a", 0, 1, 10, 10.0, 0.0, cost=StepCost(2.0, 3.0), probe=StepCost(5.0, 7.0))
    assert clock.Spent(2 * 37.0, 2 * 62.0, 0.5) == clock.spent(report, drift=2.0, network_seconds=0.5)
    assert (37.5, 62.5) == (
        clock.spent(report, 1.0, 0.5).total("backward"),
        clock.spent(report, 1.0, 0.5).total("train"),
    )


def test_a_client_after_the_deadline_does_not_count():
    run = run_config("fedavg", num_rounds=2, deadline_factor=3.5)
    first, second = play(run, slowed(FLEET)).records
    assert ("client-3",) == first.late == second.late
    assert pytest.approx(3.5 * T_TH) == first.latency_seconds
    assert [0, 1, 2] == [int(entry.client[-1]) for entry in first.clients]


def test_over_selection_closes_with_the_fastest():
    record = play(run_config("fedavg", num_participants=2, over_select=2.0), slowed(FLEET)).records[0]
    assert (4, 2, ("client-2", "client-3")) == (record.num_tasks, record.num_updates, record.late)
    assert pytest.approx(2 * T_TH) == record.latency_seconds


def test_timelyfl_drops_clients_after_the_interval():
    # Twice as slow as their profiles say, all miss the interval; the round takes the first that comes.
    heated = Faults(drift_factor=2.0, drift_rounds=1)
    first, second = play(run_config("timelyfl", num_rounds=2), slowed(FLEET), faults=heated).records
    assert () == first.late
    assert ["client-3"] == [entry.client for entry in second.clients]
    assert ("client-2", "client-0", "client-1") == second.late
    assert pytest.approx(2 * 4 * 4 * 0.137) == second.latency_seconds


def test_epochs_make_the_deadline_as_long_as_the_work():
    table = {"num_steps": 0, "num_epochs": 2, "batch_size": 8, "lr": 0.1}
    run = run_config("fedavg", num_rounds=1)
    run = type(run).parse({**run.table(), "work": table})
    record = play(run, slowed(FLEET, num_samples=40)).records[0]
    assert pytest.approx(8 * 10 * BACKWARD) == record.deadline_seconds
    assert pytest.approx(4 * 10 * BACKWARD) == record.latency_seconds


def test_network_time_follows_the_bytes():
    # FedAvg sends every weight and statistic: 273 weights, 12 statistics, 4 bytes each; the classifier has no
    # exit. Down comes the whole model the first time, and what changed (all of that) the second.
    link = Link(up_mbps=0.008, down_mbps=0.016, latency_seconds=0.25)
    first, second = play(run_config("fedavg", num_rounds=2), slowed([1.0]), link=link).records
    exits = sum(t.size for t in fakes.spec().tensors if t.name.startswith("exits."))
    assert (4 * 285, 4 * (285 + exits)) == (first.bytes_up, first.bytes_down)
    assert (4 * 285, 4 * 285) == (second.bytes_up, second.bytes_down)
    assert pytest.approx(T_TH + 0.5 + 1.140 + (1.140 + 0.004 * exits) / 2) == first.latency_seconds
    assert pytest.approx(T_TH) == first.clients[0].train_seconds
    assert pytest.approx(0.5 + 1.140 + 1.140 / 2) == second.clients[0].network_seconds
