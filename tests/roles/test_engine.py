"""The round engine by scenes: what is decided, without clock, network, files or threads."""

from __future__ import annotations

import pytest

from fedel.errors import ServiceError
from fedel.roles import effects as ef
from fedel.roles import events as ev
from tests.roles.world import CLIENTS, World, engine_of, member_of, report_of

FAST, SECOND, THIRD, SLOW = CLIENTS


def opened(*clients: str, **rounds: object) -> World:
    """A world whose first round is open."""
    world = World(engine_of(**{"evaluate_every": 0} | rounds))
    for client in clients or CLIENTS:
        world.apply(ev.Joined(member_of(client)))
    world.tick()
    assert world.state.open is not None
    return world


def kinds(effects: list[ef.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects if not isinstance(effect, ef.Wait)]


def test_the_plan_is_kept_before_anyone_receives_it() -> None:
    world = World(engine_of())
    world.apply(ev.Joined(member_of(FAST)))
    assert ["Persist", "Persist", "Open", "SendTask"] == kinds(world.apply(ev.Tick()))
    assert "plan" in world.disk


def test_the_first_round_waits_for_min_clients() -> None:
    world = World(engine_of(min_clients=2))
    world.apply(ev.Joined(member_of(FAST)))
    world.tick()
    assert (None, "waits for 1 more client") == (world.state.open, world.waits.why)
    world.apply(ev.Joined(member_of(SLOW)))
    world.tick()
    assert world.state.open is not None


def test_a_report_alone_seals_nothing() -> None:
    world = opened(FAST)
    world.finish_task(FAST)
    assert world.state.open.status == "open"
    assert "Seal" in kinds(world.apply(ev.Settle()))


def test_a_round_that_has_enough_leaves_the_slow_ones_out() -> None:
    world = opened(num_participants=2, over_select=2.0)
    for client in (FAST, SECOND):
        world.finish_task(client)
    world.tick()
    world.answer()
    world.answer()
    world.tick()
    assert [FAST, SECOND] == [entry.client for entry in world.closed[0].clients]
    assert 4 == world.closed[0].num_tasks


def test_one_that_never_comes_makes_the_round_wait_for_its_deadline() -> None:
    world = opened(FAST, SLOW)
    world.finish_task(FAST)
    deadline = world.state.open.deadline
    world.now = deadline - 0.1
    assert [] == kinds(world.apply(ev.Tick()))
    world.now = deadline
    assert ["Persist", "Seal"] == kinds(world.apply(ev.Tick()))


def test_too_few_reports_hold_a_round_open_until_there_are_enough() -> None:
    world = opened(FAST, SECOND, THIRD, min_reports=2)
    world.finish_task(FAST)
    world.now = world.state.open.deadline
    world.tick()
    missing = f"'{SECOND}' did not answer, '{THIRD}' did not answer"
    assert world.waits.why == f"1 of 2 reports at the deadline; waits for more: {missing}"
    world.finish_task(SECOND)
    assert ["Persist", "Seal"] == kinds(world.apply(ev.Settle()))


def test_a_round_nobody_answers_is_given_to_others() -> None:
    world = opened(FAST)
    world.apply(ev.Joined(member_of(SLOW)))
    world.now = world.state.open.deadline
    effects = world.apply(ev.Tick())
    assert {SLOW} == {effect.task.client for effect in effects if isinstance(effect, ef.SendTask)}
    assert {FAST, SLOW} == set(world.state.open.tasks)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (ev.Left(SLOW), "it left"),
        (ev.Declined(SLOW, 0, "too hot"), "it declined: too hot"),
        (ev.Failed(SLOW, 0, "out of memory"), "out of memory"),
        (ev.Failed(SLOW, -1, "no data"), "no data"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nobody_waits_for_a_lost_client(event: ev.Event, why: str) -> None:
    world = opened(FAST, SLOW)
    world.finish_task(FAST)
    world.apply(event)
    assert {SLOW: why} == world.state.open.lost
    assert "Seal" in kinds(world.apply(ev.Settle()))


def test_a_client_that_joins_again_gets_its_task_again() -> None:
    world = opened(FAST, SLOW)
    world.apply(ev.Failed(SLOW, 0, "a passing error"))
    assert ["Persist", "SendTask"] == kinds(world.apply(ev.Joined(member_of(SLOW))))
    assert {} == world.state.open.lost


def test_a_silent_client_is_not_planned() -> None:
    world = World(engine_of(evaluate_every=0))
    for client in (FAST, SLOW):
        world.apply(ev.Joined(member_of(client)))
    world.apply(ev.Lost(SLOW))
    world.tick()
    assert {FAST} == set(world.state.open.tasks)


def test_a_report_of_another_client_or_round_is_ignored() -> None:
    world = opened(FAST, SLOW)
    for report in (report_of(SLOW, 0), report_of(FAST, 1), report_of(FAST, -1)):
        effects = world.apply(ev.Done(FAST, ev.TaskResult(report)))
        assert ["Ignore"] == kinds(effects)
    assert not world.state.open.done


def test_another_version_of_the_model_ends_the_run() -> None:
    world = opened(FAST)
    world.finish_task(FAST)
    world.tick()
    world.answer()
    world.apply(ev.Committed(0, 7, {}, {}))
    assert "failed" == world.state.phase
    assert "they hold another run of this name" in world.state.message


def test_the_best_model_is_kept_before_the_round_closes() -> None:
    world = opened(FAST, evaluate_every=1)
    world.finish_task(FAST)
    world.tick()
    world.answer()
    world.answer()
    world.tick()
    assert [(FAST, 1)] == world.evaluators
    assert ["Keep"] == kinds(world.apply(ev.Evaluated(1, 0.5, 0.5, client=FAST)))
    assert [] == world.closed
    world.answer()
    assert [0.5] == [record.accuracy for record in world.closed]
    assert (0.5, 1) == (world.state.best_accuracy, world.state.best_version)


def test_a_stopping_run_finishes_its_round_and_cannot_be_resumed() -> None:
    world = opened(FAST)
    world.apply(ev.Controlled("stop"))
    with pytest.raises(ServiceError, match="stopping"):
        world.engine.apply(world.state, ev.Controlled("resume"), world.now)
    world.run_to_the_end()
    assert ("stopped", 1) == (world.state.phase, len(world.closed))


def test_close_now_closes_with_what_is_there() -> None:
    world = opened(FAST)
    world.apply(ev.CloseNow())
    _, effects = world.engine.apply(world.state, ev.Sealed(0, (), final=True), world.now)
    assert [ef.Commit(0, ())] == [effect for effect in effects if isinstance(effect, ef.Commit)]


def test_the_deadline_starts_again_with_the_process() -> None:
    world = opened(FAST)
    world.now += 1000
    world.restart()
    assert world.now + world.state.open.plan.deadline_seconds == world.state.open.deadline
