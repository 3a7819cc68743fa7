"""Clients that an operator keeps back, and the clients that a run names while it waits."""

from __future__ import annotations

from dataclasses import replace

from fedel.roles import events as ev
from fedel.roles.missing import MAX_UNREADY
from tests.roles.test_engine import FAST, SECOND, SLOW, opened
from tests.roles.world import World, engine_of, member_of


def test_a_client_that_could_not_join_is_named_with_its_reason() -> None:
    world = World(engine_of(min_clients=2))
    world.apply(ev.Joined(member_of(FAST)))
    world.apply(ev.Failed(SLOW, -1, "cannot import mydata; is it installed?"))
    world.tick()
    assert f"waits for 1 more client; {SLOW} could not join: cannot import mydata; is it installed?" == (
        world.waits.why
    )
    world.apply(ev.Joined(member_of(SLOW)))
    world.tick()
    assert world.state.open is not None
    assert {} == world.state.unready


def test_clients_that_left_or_are_silent_or_cordoned_are_named() -> None:
    world = World(engine_of(min_clients=4))
    for client in (FAST, SECOND, SLOW):
        world.apply(ev.Joined(member_of(client)))
    world.apply(ev.Left(FAST))
    world.apply(ev.Lost(SECOND))
    world.apply(ev.Withheld(SLOW, True))
    world.tick()
    for said in (f"{FAST} has left", f"{SECOND} is silent", f"{SLOW} is cordoned"):
        assert said in world.waits.why


def test_a_message_names_a_few_and_counts_the_rest() -> None:
    world = World(engine_of())
    for number in range(MAX_UNREADY + 50):
        world.apply(ev.Failed(f"client-{number:03}", -1, "x" * 5000))
    world.tick()
    assert MAX_UNREADY == len(world.state.unready)
    assert f"and {MAX_UNREADY - 3} more" in world.waits.why
    assert len(world.waits.why) < 1200
    assert "client-149" in world.state.unready, "the newest are kept"


def test_a_withheld_client_finishes_its_task_and_gets_no_other() -> None:
    world = opened(FAST, SLOW)
    world.apply(ev.Withheld(SLOW, True))
    world.tick()
    assert world.state.open.status == "open", "the round waits for it"
    assert {FAST, SLOW} == world.state.working
    for client in (FAST, SLOW):
        world.finish_task(client)
    world.tick()
    world.answer()
    world.answer()
    world.tick()
    assert [FAST, SLOW] == [entry.client for entry in world.closed[0].clients]
    assert [FAST] == list(world.state.open.tasks)
    world.apply(ev.Withheld(SLOW, False))
    world.finish_task(FAST)
    world.tick()
    world.answer()
    world.answer()
    world.tick()
    assert {FAST, SLOW} == world.state.open.tasks.keys()


def test_a_withheld_client_that_joins_again_gets_its_open_task_and_stays_withheld() -> None:
    world = opened(FAST, SLOW)
    world.apply(ev.Withheld(SLOW, True))
    world.apply(ev.Disconnected(SLOW))
    world.tasks.clear()
    world.apply(ev.Joined(replace(member_of(SLOW), withheld=True)))
    assert {SLOW} == world.tasks.keys()
    assert not world.state.members[SLOW].present


def test_a_withheld_client_finishes_the_test_that_it_has() -> None:
    world = opened(FAST, evaluate_every=1)
    world.finish_task(FAST)
    world.tick()
    world.answer()
    world.answer()
    world.tick()
    assert FAST == world.state.evaluation.evaluator
    world.apply(ev.Withheld(FAST, True))
    world.tick()
    assert FAST == world.state.evaluation.evaluator
    assert FAST in world.state.working
