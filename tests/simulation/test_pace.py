"""T_th on the virtual clock: kept by plan, kept by the clock, and learned from measured seconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from fedel.job import RunConfig
from fedel.roles.planner import Handover, RoundPlanner
from fedel.simulation.conditions import Link
from fedel.types import Role
from tests.simulation.history import History, Script, play_run
from tests.strategies.fakes import WORK, fleet, spec

ROUNDS = 7


def played(
    pace: str = "clock",
    slow: dict[int, dict[str, float]] | None = None,
    rounds: dict[str, Any] | None = None,
    budget: dict[str, Any] | None = None,
    compression: str = "none",
    link: Link | None = None,
    **options: Any,
) -> History:
    job = RunConfig.parse(
        {
            "strategy": {"name": "fedel", "budget_scope": "round", **options},
            "rounds": {"num_rounds": ROUNDS, "evaluate_every": 0} | (rounds or {}),
            "budget": {"pace": pace} | (budget or {}),
            "work": asdict(WORK) | {"num_steps": 50},
            "upload": {"compression": compression},
        }
    )
    return play_run(job, fleet(4), faults=Script(slow=slow or {}), link=link)


def deviations(history: History, client: str) -> list[float]:
    found = [entry.deviation for r in history.records for entry in r.clients if entry.client == client]
    assert all(each is not None for each in found)
    return [each or 0.0 for each in found]


@pytest.mark.parametrize("pace", ["plan", "clock"])
def test_every_client_takes_t_th_in_every_round(pace: str) -> None:
    history = played(pace)
    for client in fleet(4):
        assert max(abs(each) for each in deviations(history, client)) < 0.05


@pytest.mark.parametrize("pace", ["plan", "clock"])
def test_compression_buys_tensors_over_a_slow_uplink_within_t_th(pace: str) -> None:
    step = played("plan").budget_seconds
    slow = Link(up_mbps=8e-6 * spec().num_bytes / (50 * step))  # the whole model takes T_th
    plain, small = (
        played(pace, budget={"policy": "fixed", "value": step}, compression=name, link=slow)
        for name in ("none", "int8")
    )
    for client in fleet(4):
        assert max(deviations(plain, client)) < 1e-6
        assert -0.05 < min(deviations(small, client)) <= max(deviations(small, client)) < 1e-6
    few, more = (sum(len(report.selected) for report in history.reports) for history in (plain, small))
    assert more > 1.1 * few
    assert sum(r.bytes_up for r in small.records) < sum(r.bytes_up for r in plain.records)


def test_t_th_counts_the_bytes_that_compression_makes() -> None:
    slow = Link(up_mbps=1.0)
    plain, small = (played("plan", compression=name, link=slow).budget_seconds for name in ("none", "int8"))
    statistics = sum(t.num_bytes for t in spec().tensors if t.role is Role.BUFFER)
    compressed = statistics + sum(t.size + 4 for t in spec().tensors if t.role is not Role.BUFFER)
    assert plain - small == pytest.approx(slow.up_seconds(spec().num_bytes - compressed) / 50)


def test_steps_of_the_plan_take_as_long_as_they_like() -> None:
    """What the test above shows is not so by itself."""
    history = played("plan", steps="plan")
    assert max(abs(each) for client in fleet(4) for each in deviations(history, client)) > 0.1


def test_a_device_that_becomes_twice_as_slow_keeps_t_th_by_the_clock() -> None:
    slow = {number: {"client-2": 2.0} for number in range(3, ROUNDS)}
    by_clock, by_plan = played("clock", slow), played("plan", slow)
    assert max(abs(each) for each in deviations(by_clock, "client-2")) < 0.05
    assert all(each > 0.5 for each in deviations(by_plan, "client-2")[3:])


def test_what_was_measured_is_in_the_next_plans() -> None:
    slow = {number: {"client-2": 2.0} for number in range(3, ROUNDS)}
    history = played("clock", slow)
    learned = [plan.tasks[2].speed.slowness for plan in history.plans]
    assert learned[:4] == [1.0] * 4
    assert learned == sorted(learned)
    assert learned[-1] > 1.8
    predicted = [entry.predicted_deviation for entry in history.records[-1].clients]
    assert all(abs(each or 0.0) < 0.1 for each in predicted)


def test_t_th_follows_the_fastest_device_as_it_was_measured() -> None:
    slow = {number: {"client-0": 2.0} for number in range(ROUNDS)}
    budgets = [record.budget_seconds for record in played("clock", slow).records]
    assert budgets[1] == pytest.approx(2 * budgets[0])
    assert budgets == sorted(budgets)


def test_what_is_learned_of_a_method_without_a_budget_does_not_grow() -> None:
    """Its clients make the steps of the plan; what they take is compared with the profile all the same."""
    slow = {number: {f"client-{n}": 2.0 for n in range(4)} for number in range(ROUNDS)}
    job = RunConfig.parse(
        {
            "strategy": {"name": "fedavg"},
            "rounds": {"num_rounds": ROUNDS, "evaluate_every": 0},
            "budget": {"pace": "clock"},
            "work": asdict(WORK),
        }
    )
    history = play_run(job, fleet(4), faults=Script(slow=slow))
    learned = [{round(task.speed.slowness, 6) for task in plan.tasks} for plan in history.plans]
    assert [{1.0}] + [{2.0}] * (ROUNDS - 1) == learned


def test_a_run_by_plan_learns_nothing() -> None:
    slow = {number: {"client-2": 2.0} for number in range(ROUNDS)}
    assert {1.0} == {task.speed.slowness for plan in played("plan", slow).plans for task in plan.tasks}


def test_a_run_ends_when_its_time_is_over_and_its_last_model_is_tested() -> None:
    seconds = [record.latency_seconds for record in played("plan").records]
    limit = 0.99 * sum(seconds[:3])
    assert len(played("plan", rounds={"max_seconds": limit}).records) == 3
    planner = RoundPlanner(RunConfig.parse({"rounds": {"max_seconds": limit}}), spec())
    assert planner.is_over(Handover(round_num=3, seconds=limit))
    assert not planner.is_over(Handover(round_num=3, seconds=limit / 2))
    assert planner.evaluation_due(2, is_last=True)
