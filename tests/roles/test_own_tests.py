"""Clients test the model on their own data, beside the next round and beside the global test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedel.client_tests import OwnScore
from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.gate_session import objection_to_join
from tests.roles.test_engine import FAST, SLOW, kinds
from tests.roles.test_overlap import commit
from tests.roles.world import SPEC, World, engine_of, member_of

HELD = {FAST: 20, SLOW: 10}


def opened(**rounds: object) -> World:
    defaults = {"evaluate_every": 0, "min_clients": 2, "evaluate_clients_every": 1}
    world = World(engine_of(**{**defaults, **rounds}))
    for client, number in HELD.items():
        world.apply(ev.Joined(replace(member_of(client), num_held_out=number)))
    world.tick()
    return world


def tell(
    world: World, client: str, accuracy: float = 0.5, version: int = 1, **other: object
) -> list[ef.Effect]:
    event = ev.OwnTested(client, version, accuracy, 1.0 - accuracy, HELD[client], 0.1)
    return world.apply(replace(event, **other))  # type: ignore[arg-type]


def test_every_client_is_asked_and_the_record_has_all() -> None:
    world = opened()
    effects = commit(world)
    assert ["SendTask", "SendTask", "AskOwnTest", "AskOwnTest"] == kinds(effects)[-4:]
    assert 1 == world.state.open.round_num, "the next round does not wait"
    tell(world, FAST, 0.9)
    assert [] == world.closed
    tell(world, SLOW, 0.6)
    (record,) = world.closed
    tests = record.client_tests
    assert tests is not None
    assert (OwnScore(FAST, "fake", 0.9, pytest.approx(0.1), 20), 0) == (tests.clients[0], tests.num_missing)
    spread = tests.overall
    assert pytest.approx((0.75, 0.8, 0.6, 0.15)) == (
        spread.mean_accuracy,
        spread.weighted_accuracy,
        spread.worst_accuracy,
        spread.deviation,
    )
    assert (SLOW, {"fake"}) == (spread.worst_client, set(tests.by_device_type))
    assert record.accuracy is None, "nobody tested on the data set's test data"


@pytest.mark.parametrize("own_first", [True, False])
def test_the_record_waits_for_both_kinds_of_tests(own_first: bool) -> None:
    world = opened(evaluate_every=1)
    commit(world)

    def own() -> None:
        tell(world, FAST)
        tell(world, SLOW)

    def whole() -> None:
        world.evaluate(0.7)
        world.answer_all()

    first, second = (own, whole) if own_first else (whole, own)
    first()
    assert [] == world.closed
    second()
    assert [(0.7, 2)] == [(r.accuracy, r.client_tests.overall.num_clients) for r in world.closed]
    assert (0.7, 1) == (world.state.best_accuracy, world.state.best_version)


def test_only_in_the_rounds_that_the_job_says_and_after_the_last() -> None:
    world = opened(evaluate_clients_every=2, num_rounds=3)
    assert "AskOwnTest" not in kinds(commit(world))
    assert 2 == kinds(commit(world)).count("AskOwnTest")
    tell(world, FAST, version=2)
    tell(world, SLOW, version=2)
    assert 2 == kinds(commit(world)).count("AskOwnTest")
    assert "running" == world.state.phase
    tell(world, FAST, version=3)
    tell(world, SLOW, version=3)
    world.tick()
    assert "finished" == world.state.phase
    assert [False, True, True] == [record.client_tests is not None for record in world.closed]


def test_who_does_not_answer_in_time_is_missing_and_holds_nobody_up() -> None:
    world = opened()
    commit(world)
    tell(world, FAST)
    world.now = world.waits.until
    world.tick()
    assert [(1, 1)] == [(r.client_tests.overall.num_clients, r.client_tests.num_missing) for r in world.closed]
    assert [] == [e for e in tell(world, SLOW) if isinstance(e, ef.Ignore)], "too late is no offence"


def test_one_that_is_gone_is_not_waited_for_and_one_that_comes_back_is_asked_again() -> None:
    world = opened()
    commit(world)
    tell(world, FAST)
    world.apply(ev.Disconnected(SLOW))
    assert "AskOwnTest" not in kinds(world.apply(ev.Settle()))
    world.apply(ev.Joined(replace(member_of(SLOW), num_held_out=HELD[SLOW])))
    assert ["AskOwnTest"] == kinds(world.apply(ev.Settle()))
    world.apply(ev.Left(SLOW))
    world.apply(ev.Settle())
    assert [1] == [record.client_tests.num_missing for record in world.closed]


def test_after_a_restart_all_are_asked_again() -> None:
    world = opened()
    commit(world)
    tell(world, FAST)
    world.restart()
    for client, number in HELD.items():
        world.apply(ev.Joined(replace(member_of(client), num_held_out=number)))
    assert 2 == kinds(world.apply(ev.Settle())).count("AskOwnTest")
    tell(world, FAST, 0.2)
    tell(world, SLOW, 0.3)
    assert [0.25] == [record.client_tests.overall.mean_accuracy for record in world.closed]


def test_one_that_cannot_test_stays_in_the_run() -> None:
    world = opened()
    commit(world)
    tell(world, FAST)
    (ignored,) = [e for e in tell(world, SLOW, problem="out of memory") if isinstance(e, ef.Ignore)]
    assert "out of memory" in ignored.reason
    assert [1] == [record.client_tests.num_missing for record in world.closed]
    assert not world.state.members[SLOW].has_left


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"accuracy": 1.5}, "accuracy"),
        ({"accuracy": float("nan")}, "accuracy"),
        ({"loss": float("inf")}, "loss"),
        ({"num_samples": 10**6}, "is of 1000000 samples, and the client holds 10 out"),
        ({"seconds": -1.0}, "seconds"),
    ],
)
def test_a_lie_beyond_bounds_is_left_out(wrong: dict[str, float], words: str) -> None:
    world = opened()
    commit(world)
    (ignored,) = [e for e in tell(world, SLOW, **wrong) if isinstance(e, ef.Ignore)]
    assert words in ignored.reason
    tell(world, FAST)
    assert [[FAST]] == [[score.client for score in record.client_tests.clients] for record in world.closed]


def test_what_nobody_asked_for_is_refused() -> None:
    world = opened(evaluate_clients_every=2)
    commit(world)
    assert "Ignore" not in kinds(tell(world, FAST)), "no test is open: it may be late"
    world = opened()
    world.apply(ev.Joined(member_of("client-2")))
    commit(world)
    event = ev.OwnTested("client-2", 1, 0.5, 0.5, 10)
    (ignored,) = [e for e in world.apply(event) if isinstance(e, ef.Ignore)]
    assert "not asked for" in ignored.reason


def test_a_join_says_how_many_within_bounds() -> None:
    member = replace(member_of(FAST), num_held_out=-1)
    assert "holds -1 samples out" in objection_to_join(SPEC.digest, member, SPEC)


def test_a_client_counts_no_more_than_a_job_lets_it() -> None:
    world = opened(max_samples=10)
    commit(world)
    tell(world, FAST, 1.0)
    tell(world, SLOW, 0.0)
    assert [0.5] == [record.client_tests.overall.weighted_accuracy for record in world.closed]
