"""Late clients: who gets a task meanwhile, what becomes of theirs, and work that takes several rounds."""

from __future__ import annotations

import numpy as np
import pytest

from fedel.core.budgeted import Prices
from fedel.core.staleness import Staleness, caught_up
from fedel.errors import ConfigError
from fedel.job import RunConfig
from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.coordinator import RoundEngine
from fedel.roles.planner import Handover, RoundPlanner
from fedel.types import ClientView, ModelSpec, Patch, Report, Role, Speed, TensorSpec, Update, Window
from tests.roles.world import CLIENTS, PROFILES, SPEC, World, engine_of, member_of

FAST, OTHER, SLOW = CLIENTS[:3]


def opened(*clients: str, **rounds: object) -> World:
    settings = {"num_rounds": 9, "evaluate_every": 0, "late": "weigh", "max_staleness": 2}
    world = World(engine_of("fedel", **(settings | rounds)))
    for client in clients:
        world.apply(ev.Joined(member_of(client)))
    world.tick()
    return world


def close_without(world: World, *late: str) -> list[ef.Effect]:
    """Everyone else is done; at the deadline the round closes, and the next one opens. What is sent."""
    assert world.state.open is not None
    for client in set(world.state.open.tasks) - set(late):
        world.finish_task(client)
    world.tick(1e6)
    sealed, world.answers = world.answers, []
    effects = [effect for answer in sealed for effect in world.apply(answer)]
    committed, world.answers = world.answers, []
    effects += [effect for answer in committed for effect in world.apply(answer)]
    return effects + world.apply(ev.Tick())


def tasks_in(effects: list[ef.Effect]) -> list[str]:
    return sorted(effect.task.client for effect in effects if isinstance(effect, ef.SendTask))


def test_a_client_at_work_gets_no_task_until_it_is_too_late() -> None:
    world = opened(FAST, SLOW)
    assert [FAST] == tasks_in(close_without(world, SLOW))
    assert [FAST] == tasks_in(close_without(world, SLOW))
    effects = close_without(world, SLOW)
    assert [FAST, SLOW] == tasks_in(effects)
    assert ef.SendClosed(SLOW, 2, False) in effects, "it gives its work up"


def test_a_late_update_counts_and_its_client_goes_on() -> None:
    world = opened(FAST, SLOW)
    close_without(world, SLOW)
    close_without(world, SLOW)
    world.finish_task(SLOW)
    effects = close_without(world)
    assert ef.SendClosed(SLOW, 0, True) in effects
    assert [FAST, SLOW] == tasks_in(effects)
    assert {FAST: 0, SLOW: 2} == {entry.client: entry.staleness for entry in world.closed[-1].clients}
    assert 0 == world.state.handover.accepted_round(SLOW)


def test_a_late_update_does_not_close_a_round() -> None:
    world = opened(FAST, OTHER, SLOW)
    close_without(world, SLOW)
    world.finish_task(SLOW)
    world.finish_task(FAST)
    world.tick()
    assert world.state.open is not None
    assert "open" == world.state.open.status


@pytest.mark.parametrize("end", [ev.Failed(SLOW, 0, "broken"), ev.Declined(SLOW, 0, "no"), ev.Left(SLOW)])
def test_work_that_will_not_be_done_is_not_waited_for(end: ev.Event) -> None:
    world = opened(FAST, SLOW)
    close_without(world, SLOW)
    world.apply(end)
    world.apply(ev.Joined(member_of(SLOW)))
    assert [FAST, SLOW] == tasks_in(close_without(world))


def test_a_claim_without_an_update_frees_the_client() -> None:
    world = opened(FAST, SLOW)
    close_without(world, SLOW)
    world.claim(SLOW, SLOW, 0)
    assert [FAST, SLOW] == tasks_in(close_without(world))
    assert [0] == [entry.staleness for entry in world.closed[-1].clients]


def test_who_comes_back_is_sent_its_old_task_again() -> None:
    world = opened(FAST, SLOW)
    before = world.tasks[SLOW].task
    close_without(world, SLOW)
    world.restart()
    (sent,) = [e for e in world.apply(ev.Joined(member_of(SLOW))) if isinstance(e, ef.SendTask)]
    assert before == sent.task


def test_if_everyone_is_at_work_they_begin_again() -> None:
    world = opened(FAST, SLOW)
    close_without(world, SLOW)
    world.finish_task(FAST)
    world.apply(ev.Left(FAST))
    world.tick(1e6)
    world.answer_all()
    assert [SLOW] == tasks_in(world.apply(ev.Tick()))
    assert world.state.open is not None
    assert {SLOW: 2} == {client: task.round_num for client, task in world.state.open.tasks.items()}


def planner_of(strategy: dict[str, object], **rounds: object) -> RoundPlanner:
    table = {
        "strategy": strategy,
        "rounds": {"late": "weigh", "deadline_floor_seconds": 0.0, "deadline_factor": 1.5} | rounds,
        "work": {"num_steps": 4},
    }
    return RoundPlanner(RunConfig.parse(table), SPEC)


def views(**speeds: Speed) -> list[ClientView]:
    return [ClientView(name, 10, PROFILES[name], speed=speeds.get(name, Speed())) for name in CLIENTS]


def test_fedavg_takes_as_many_rounds_as_a_device_is_slower() -> None:
    """The fake devices are 1, 2, 3 and 4 times slower than the first."""
    clients = views()
    plan = planner_of({"name": "fedavg"}).plan(Handover(), clients)
    assert [1, 2, 3, 4] == [task.num_rounds for task in plan.tasks]
    budget = plan.tasks[0].budget_seconds
    assert [budget * n for n in (1, 2, 3, 4)] == [task.budget_seconds for task in plan.tasks]
    assert plan.deadline_seconds == pytest.approx(1.5 * 4 * budget)
    refused = planner_of({"name": "fedavg"}, late="refuse").plan(Handover(), clients)
    assert [1] * 4 == [task.num_rounds for task in refused.tasks]


def test_what_would_come_too_late_is_planned_as_ever() -> None:
    plan = planner_of({"name": "fedavg"}, max_staleness=2).plan(Handover(), views())
    assert [1, 2, 1, 1] == [task.num_rounds for task in plan.tasks]


def test_fedel_takes_several_rounds_where_not_even_one_step_fits() -> None:
    fedel = {"name": "fedel", "budget_scope": "round"}
    fast = planner_of(fedel).plan(Handover(), views())
    assert [1] * 4 == [task.num_rounds for task in fast.tasks]
    last = Window(SPEC.num_blocks, SPEC.num_blocks)
    prices = Prices.on(fast.tasks[2], SPEC, PROFILES[SLOW], 10, "round")
    rate = prices.bytes_down(last) / (2.2 * prices.round_seconds)
    plan = planner_of(fedel).plan(Handover(), views(**{SLOW: Speed(down_rate=rate, up_rate=1e12)}))
    assert [1, 1, 3, 1] == [task.num_rounds for task in plan.tasks]


def test_a_round_does_not_wait_for_work_that_takes_several() -> None:
    world = World(RoundEngine(planner_of({"name": "fedavg"}, num_rounds=9, evaluate_every=0)))
    for client in (FAST, SLOW):
        world.apply(ev.Joined(member_of(client)))
    world.tick()
    world.finish_task(FAST)
    world.tick()
    world.answer_all()
    world.tick()
    assert world.state.open is not None
    assert (1, {FAST}) == (world.state.open.round_num, set(world.state.open.tasks))
    assert {SLOW: 3} == {name: task.num_rounds for name, task in world.state.handover.at_work.items()}


def test_settings_that_make_no_sense_are_refused() -> None:
    for rounds in (
        {"late": "perhaps"},
        {"late": "weigh", "max_staleness": 0},
        {"late": "weigh", "max_staleness": 1000},
        {"late": "weigh", "staleness_power": -1.0},
        {"late": "weigh", "staleness_power": float("nan")},
    ):
        with pytest.raises(ConfigError):
            RunConfig.parse({"rounds": rounds})
    with pytest.raises(ConfigError, match="late"):
        RunConfig.parse({"protection": {"secure": True}, "rounds": {"late": "weigh"}})


def test_what_counts_of_a_late_update() -> None:
    """Of weights a share of the change, of statistics a share of the way: a variance stays positive."""
    tensors = (TensorSpec("w", (2,), 1), TensorSpec("var", (2,), 1, Role.BUFFER))
    spec = ModelSpec("two", 1, tensors)
    old = {"w": np.array([1, 1], np.float32), "var": np.array([10, 10], np.float32)}
    now = {"w": np.array([5, 5], np.float32), "var": np.array([2, 2], np.float32)}
    patches = {
        "w": Patch(np.array([3], np.float32), np.array([True, False])),
        "var": Patch(np.array([1, 1], np.float32)),
    }
    update = caught_up(Update(patches, Report("a", 0, 10, 4, 4.0, 0.5)), spec, 0.5, old, now)
    assert [6.0] == update.patches["w"].values.tolist()
    assert [1.5, 1.5] == update.patches["var"].values.tolist()
    assert np.float32 == update.patches["w"].values.dtype


def test_weights_fall_with_every_round() -> None:
    weights = [Staleness(100, 0.5).weight(n) for n in range(101)]
    assert 1.0 == weights[0]
    assert sorted(weights, reverse=True) == weights
    assert all(abs(weight - (1 + n) ** -0.5) < 1e-9 for n, weight in enumerate(weights))
