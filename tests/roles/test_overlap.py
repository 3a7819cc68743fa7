"""The test of a model goes on beside the next round, and holds it up only when it falls a round behind."""

from __future__ import annotations

from fedel.roles import effects as ef
from fedel.roles import events as ev
from tests.roles.test_engine import FAST, SECOND, SLOW, kinds, opened
from tests.roles.world import World, member_of


def commit(world: World) -> list[ef.Effect]:
    """The open round gets its updates, and its model is made; returns what the engine did next."""
    for client in (FAST, SLOW):
        world.finish_task(client)
    world.tick()
    world.answer_all()
    return world.apply(ev.Tick())


def give_score(world: World, accuracy: float) -> None:
    world.evaluate(accuracy)
    world.answer_all()


def test_the_next_round_opens_while_the_model_is_tested() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    assert ["Persist", "Open", "SendTask", "SendTask", "Evaluate"] == kinds(commit(world))
    assert ([(FAST, 1)], 1, []) == (world.evaluators, world.state.open.round_num, world.closed)
    give_score(world, 0.5)
    assert [0.5] == [record.accuracy for record in world.closed]
    assert (1, "open") == (world.state.open.round_num, world.state.open.status)


def test_a_slow_test_lets_one_more_round_commit() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    commit(world)
    assert [] == kinds(commit(world)), "the third round waits, and so does the second test"
    assert (None, [1, 2], []) == (world.state.open, [r.version for r in world.state.committed], world.closed)
    assert [(FAST, 1)] == world.evaluators
    give_score(world, 0.5)
    assert ["Persist", "Open", "SendTask", "SendTask", "Evaluate"] == kinds(world.apply(ev.Tick()))
    give_score(world, 0.4)
    assert [0.5, 0.4] == [record.accuracy for record in world.closed]
    assert (0.5, 1) == (world.state.best_accuracy, world.state.best_version)


def test_a_test_that_never_comes_holds_rounds_up_until_its_deadline() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    commit(world)
    commit(world)
    world.now = world.waits.until
    assert "SendTask" in kinds(world.apply(ev.Tick()))
    assert [None] == [record.accuracy for record in world.closed]
    assert (SLOW, 2) == world.evaluators[-1]


def test_the_last_test_is_awaited() -> None:
    world = opened(FAST, SLOW, evaluate_every=1, num_rounds=1)
    assert ["Evaluate"] == kinds(commit(world))
    assert "running" == world.state.phase
    give_score(world, 0.5)
    world.tick()
    assert ("finished", [0.5]) == (world.state.phase, [record.accuracy for record in world.closed])


def test_a_round_without_a_test_closes_behind_one_with() -> None:
    world = opened(FAST, SLOW, evaluate_every=2, num_rounds=3)
    commit(world)
    assert [0] == [record.round for record in world.closed]
    commit(world)
    commit(world)
    assert [0] == [record.round for record in world.closed], "round 2 is the last, and tested too"
    give_score(world, 0.5)
    world.tick()
    give_score(world, 0.6)
    assert [None, 0.5, 0.6] == [record.accuracy for record in world.closed]


def test_who_has_no_task_tests() -> None:
    world = opened(FAST, SECOND, SLOW, evaluate_every=1)
    for client in (FAST, SECOND, SLOW):
        world.finish_task(client)
    world.tick()
    world.answer_all()
    world.apply(ev.Lost(SLOW))
    world.tick()  # the next round is planned without it
    world.apply(ev.Found(SLOW))
    ((first, version),) = world.evaluators
    assert (FAST, 1) == (first, version)
    world.apply(ev.Disconnected(FAST))
    world.tick()
    assert (SLOW, 1) == world.evaluators[-1], "SECOND is faster, but has a task"


def test_stop_now_keeps_what_was_committed() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    commit(world)
    effects = world.apply(ev.Controlled("stop_now"))
    assert ["Persist", "Close", "Persist", "End"] == kinds(effects)
    assert "stopped in round 2, which was not closed" == world.state.message
    assert [0] == [record.round for record in world.closed]


def test_a_stopping_run_waits_for_its_tests() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    commit(world)
    world.apply(ev.Controlled("stop"))
    commit(world)
    give_score(world, 0.5)
    world.tick()
    give_score(world, 0.6)
    world.tick()
    assert ("stopped", [0.5, 0.6]) == (world.state.phase, [record.accuracy for record in world.closed])


def test_a_test_that_fails_late_costs_no_task() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    commit(world)
    commit(world)
    world.tick(1e6)
    assert world.state.open is not None
    world.apply(ev.Failed(FAST, -1, "the test took longer than limits.max_task_seconds"))
    assert {} == world.state.open.lost
    assert not world.state.members[FAST].has_left


def test_a_late_report_between_two_rounds_is_kept() -> None:
    world = opened(FAST, SLOW, late="next")
    world.finish_task(FAST)
    world.tick(1e6)
    world.answer_all()
    assert world.state.open is None
    world.finish_task(SLOW)
    assert {SLOW} == set(world.state.late_results)


def test_a_restart_asks_for_the_test_again() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    commit(world)
    commit(world)
    world.restart()
    assert [1, 2] == [record.version for record in world.state.committed]
    world.apply(ev.Joined(member_of(SLOW)))
    world.tick()
    assert [(SLOW, 1)] == world.evaluators
    for _ in range(5):
        world.behave()
    assert [0.5, 0.5, 0.5] == [record.accuracy for record in world.closed]


def test_the_test_of_a_silent_client_goes_to_another() -> None:
    world = opened(FAST, SLOW, evaluate_every=1)
    commit(world)
    world.apply(ev.Lost(FAST))
    world.tick()
    assert [(FAST, 1), (SLOW, 1)] == world.evaluators
