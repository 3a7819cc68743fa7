"""The controls: FedAvg in FedEL's time, by fewer steps or by fewer devices."""

from __future__ import annotations

import pytest

from fedel.core.timing import budget, full_steps
from fedel.strategies.fedavg_cut import FedAvgCut
from fedel.strategies.fedavg_fast import FedAvgFast
from fedel.types import LocalWork, Memory
from tests.simulation.history import run_rounds
from tests.strategies.fakes import Recorder, context_of, fleet, initial_model, profile, same_bits, spec

WORK = LocalWork(num_steps=40, batch_size=4)


@pytest.mark.parametrize("scope", ["backward", "train"])
def test_slow_devices_make_their_share_of_the_steps(scope: str) -> None:
    clients = {f"c{s}": Recorder(s, 20, profile(s)) for s in (1, 2, 3, 4)}
    seconds = budget(full_steps([c.profile for c in clients.values()], scope))
    strategy = FedAvgCut(budget_scope=scope)
    for task in strategy.plan(context_of(clients, budget_seconds=seconds, work=WORK)).tasks:
        update, _ = strategy.fit(task, initial_model(), Memory(), clients[task.client])
        assert update.report.num_steps * update.report.cost.total(scope) <= 40 * seconds * (1 + 1e-9)
        assert update.report.num_samples == 20
        assert set(update.report.selected) == {t.name for t in spec().weights}
    assert [c.asked[0].num_steps for c in clients.values()] == [40, 20, 13, 10]


def test_its_exits_can_answer_as_those_of_fedel_do() -> None:
    client = Recorder(1, 20, profile(2))
    seconds = full_steps([profile()], "train")[0]
    strategy = FedAvgCut(budget_scope="train", answer=0.5)
    (task,) = strategy.plan(context_of({"a": client}, budget_seconds=seconds, work=WORK)).tasks
    update, _ = strategy.fit(task, initial_model(), Memory(), client)
    (train_spec,) = client.asked
    assert (4, 5, 6) == train_spec.exits == strategy.exits_to_average(spec())
    assert train_spec.detached
    assert update.report.batches < 20
    assert update.report.batches * update.report.cost.total("train") <= 40 * seconds * (1 + 1e-9)


def test_cut_steps_are_never_more_than_planned_and_never_none() -> None:
    quick, hopeless = Recorder(1, 20, profile(0.1)), Recorder(2, 20, profile(1000))
    clients = {"a": quick, "b": hopeless}
    seconds = full_steps([profile(1)], "backward")[0]
    strategy = FedAvgCut()
    tasks = strategy.plan(context_of(clients, budget_seconds=seconds, work=WORK)).tasks
    reports = [strategy.fit(task, initial_model(), Memory(), clients[task.client])[0].report for task in tasks]
    assert [(r.num_steps, r.over_budget) for r in reports] == [(40, False), (1, True)]


def test_a_fleet_of_equals_is_fedavg() -> None:
    from fedel.strategies import FedAvg

    alike = {f"c{i}": Recorder(i, 20 + i, profile()) for i in range(4)}
    plain, *controls = (run_rounds(strategy, 3, alike) for strategy in (FedAvg(), FedAvgCut(), FedAvgFast()))
    assert all(same_bits(plain.model, control.model) for control in controls)


def test_only_fast_devices_take_part_and_are_drawn_from() -> None:
    plan = FedAvgFast().plan(context_of(fleet(8)))
    assert [task.client for task in plan.tasks] == ["client-0", "client-4"]
    assert len(FedAvgFast().plan(context_of(fleet(8), num_participants=1)).tasks) == 1
    nearly = {"a": Recorder(1, 20, profile()), "b": Recorder(2, 20, profile(1.2))}
    assert len(FedAvgFast().plan(context_of(nearly)).tasks) == 1
    assert len(FedAvgFast(tolerance=0.25).plan(context_of(nearly)).tasks) == 2


def test_where_nobody_keeps_the_budget_the_fastest_train() -> None:
    plan = FedAvgFast().plan(context_of(fleet(8), budget_seconds=1e-9))
    assert [task.client for task in plan.tasks] == ["client-0", "client-4"]
    with pytest.raises(ValueError, match="tolerance = -1"):
        FedAvgFast(tolerance=-1)
