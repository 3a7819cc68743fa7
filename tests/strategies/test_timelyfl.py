"""TimelyFL: the interval, epochs for the fast, suffixes for the slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedel.core.timing import full_step
from fedel.strategies.fedavg import FedAvg
from fedel.strategies.timelyfl import TimelyFL, interval_of, longest_suffix, workload
from fedel.types import Memory, Window
from tests.simulation.history import run_rounds
from tests.strategies.fakes import WORK, Recorder, context_of, fleet, initial_model, profile, same_bits, spec


def four() -> dict[str, Recorder]:
    """Clients that take 1, 2, 3 and 4 times as long."""
    return {f"c{s}": Recorder(s, 20, profile(s)) for s in (1, 2, 3, 4)}


def test_workloads_of_four_clients() -> None:
    seconds = (10.0, 20.0, 30.0, 40.0)
    interval = interval_of(seconds, share=0.5)
    found = [workload(interval, t) for t in seconds]
    assert interval == 20
    assert [epochs for epochs, _ in found] == [2, 1, 1, 1]
    assert [alpha for _, alpha in found] == pytest.approx([1, 1, 2 / 3, 0.5])


def test_sending_takes_part_of_the_interval() -> None:
    assert workload(25.0, 10.0, comm_seconds=5.0) == (2, 1.0)
    assert workload(24.9, 10.0, comm_seconds=5.0) == (1, 1.0)
    assert workload(20.0, 35.0, comm_seconds=5.0) == (1, 0.5)


def test_interval_takes_at_least_one_client_and_rounds_up() -> None:
    assert interval_of([3.0, 1.0, 2.0], share=0.5) == 2.0
    assert interval_of([3.0, 1.0, 2.0], share=0.01) == 1.0
    assert interval_of([3.0, 1.0, 2.0], share=1.0) == 3.0


def test_rounding_does_not_cost_an_epoch() -> None:
    assert workload(0.1 * 3, 0.1)[0] == workload(0.3, 0.1)[0] == 3


def test_plan_of_four_clients() -> None:
    plan = TimelyFL(slack=0.25).plan(context_of(four()))
    one = full_step(profile()).total("backward") * WORK.num_steps
    assert [task.settings["interval"] for task in plan.tasks] == pytest.approx([2 * one] * 4)
    assert [task.work.num_steps for task in plan.tasks] == [8, 4, 4, 4]
    assert [task.settings["alpha"] for task in plan.tasks] == pytest.approx([1, 1, 2 / 3, 0.5])
    assert plan.close_after_seconds == pytest.approx(2.5 * one)


def test_epoch_mode_gives_steps_by_data() -> None:
    clients = {"a": Recorder(1, 8, profile()), "b": Recorder(2, 24, profile())}
    plan = TimelyFL(share=1.0).plan(context_of(clients, work=replace(WORK, num_steps=0, num_epochs=2)))
    assert [task.work.num_steps for task in plan.tasks] == [6, 6]
    assert [task.settings["epochs"] for task in plan.tasks] == [3, 1]


def test_suffix_is_the_longest_that_fits() -> None:
    client = Recorder(1, 20, profile())
    costs = {}
    for end in range(1, 7):
        # Updates of the suffix, passing through its kernels but the first, exit of the last block: none.
        times = [t for t in client.profile.tensors if t.block >= end]
        costs[end] = sum(t.update_seconds for t in times) + sum(t.grad_seconds for t in times[1:])
    for end, seconds in costs.items():
        window, cost, fits = longest_suffix(client, seconds, "backward")
        assert (window, fits) == (Window(end, 6), True)
        assert cost.backward_seconds == pytest.approx(seconds)


def test_forward_of_the_frozen_side_counts_in_scope_train() -> None:
    client = Recorder(1, 20, profile())
    forward = full_step(client.profile).forward_seconds
    in_backward, tight, _ = longest_suffix(client, 0.4, "backward")
    in_train, cost, _ = longest_suffix(client, tight.backward_seconds, "train")
    assert (in_backward.end, in_train.end) == (1, 3)
    assert forward < cost.total("train") <= tight.backward_seconds


def test_slow_client_trains_the_output_side_and_the_rest_keeps_its_bits() -> None:
    clients, model, strategy = four(), initial_model(), TimelyFL()
    slow = strategy.plan(context_of(clients)).tasks[3]
    update, _ = strategy.fit(slow, model, Memory(), clients["c4"])
    window, (train_spec,) = update.report.window, clients["c4"].asked
    assert window is not None
    assert 1 < window.end == train_spec.end
    assert train_spec.exits == (6,)
    assert (
        train_spec.selected == {t.name for t in spec().weights_in(window.end, 6)} == set(update.report.selected)
    )
    assert update.report.cost.total("backward") * train_spec.num_steps <= slow.settings["interval"] * (1 + 1e-9)
    assert {spec().by_name[name].block for name in update.patches} == set(range(window.end, 7))


def test_too_slow_for_the_last_block_trains_it_all_the_same_and_says_so() -> None:
    clients = {"a": Recorder(1, 20, profile()), "b": Recorder(2, 20, profile(1000))}
    strategy = TimelyFL()
    task = strategy.plan(context_of(clients)).tasks[1]
    update, _ = strategy.fit(task, initial_model(), Memory(), clients["b"])
    assert update.report.window == Window(6, 6)
    assert update.report.over_budget


def test_all_reports_come_before_the_round_closes() -> None:
    history = run_rounds(TimelyFL(slack=0.0), clients=fleet(8), num_participants=5)
    assert [len(updates) for updates in history.updates] == [5] * 5


def test_equal_devices_are_fedavg() -> None:
    clients = {f"c{i}": Recorder(i, 10 + i, profile()) for i in range(3)}
    timely = run_rounds(TimelyFL(), 3, clients).model
    assert same_bits(timely, run_rounds(FedAvg(weighting="uniform"), 3, clients).model)


def test_no_clients_make_an_empty_plan() -> None:
    assert TimelyFL().plan(replace(context_of(four()), clients=[])).tasks == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, "share = 0"),
        ({"slack": -1.0}, "slack = -1"),
        ({"comm_seconds": -1.0}, "comm_seconds = -1"),
        ({"budget_scope": "x"}, "budget_scope = 'x'"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimelyFL(**options)  # type: ignore[arg-type]
