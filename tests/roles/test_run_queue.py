"""Which runs start, behind whom the others wait, and which old runs are deleted."""

from __future__ import annotations

import pytest

from fedel.roles import events as ev
from fedel.roles.retention import DAY_SECONDS, Ended, to_delete, too_old
from fedel.roles.run_queue import Place, behind, to_start
from fedel.roles.run_state import RunState
from tests.roles.test_engine import FAST, kinds
from tests.roles.world import World, engine_of, member_of

ACTIVE = Place("old", "running", 0, 1.0)


def queued(run: str, priority: int = 0, created_at: float = 2.0) -> Place:
    return Place(run, "queued", priority, created_at)


def test_without_a_limit_every_run_starts() -> None:
    assert ["a", "b"] == to_start([ACTIVE, queued("b", created_at=3.0), queued("a")], 0)


def test_the_highest_priority_starts_first_then_the_oldest() -> None:
    waiting = [
        queued("late", 0, 9.0),
        queued("low", -1, 1.0),
        queued("urgent", 5, 8.0),
        queued("early", 0, 3.0),
    ]
    assert ["urgent", "early", "late", "low"] == to_start(waiting, 4)
    assert ["urgent"] == to_start([*waiting, ACTIVE], 2)
    assert [] == to_start([*waiting, ACTIVE], 1)


@pytest.mark.parametrize(("phase", "holds"), [("waiting", 1), ("stopping", 1), ("paused", 0), ("held", 0)])
def test_a_run_that_is_paused_leaves_its_place_to_others(phase: str, holds: int) -> None:
    assert [["next"], []][holds] == to_start([Place("first", phase), queued("next")], 1)


def test_more_active_runs_than_the_limit_start_nothing() -> None:
    assert [] == to_start([ACTIVE, Place("other", "running"), queued("next")], 1)


def test_a_queued_run_names_those_before_it() -> None:
    told = behind([queued("b"), ACTIVE, queued("a", 7)], 1)
    assert "waits in the queue behind old (running) (max_active_runs = 1)" == told["a"]
    assert "waits in the queue behind old (running), a (queued, priority 7) (max_active_runs = 1)" == told["b"]
    many = behind([ACTIVE, *(queued(f"r{n}", created_at=2.0 + n) for n in range(6))], 1)
    assert "old (running), r0 (queued), r1 (queued), 3 more" in many["r5"]


def test_a_queued_run_opens_no_round_before_its_turn() -> None:
    world = World(engine_of(), RunState(phase="queued"))
    world.apply(ev.Joined(member_of(FAST)))
    world.tick()
    assert (None, "") == (world.state.open, world.waits.why)
    world.apply(ev.Admitted())
    world.tick()
    assert ("running", True) == (world.state.phase, world.state.open is not None)
    assert [] == kinds(world.apply(ev.Admitted())), "said twice, it changes nothing"


@pytest.mark.parametrize(
    ("action", "phase"), [("pause", "paused"), ("stop", "stopped"), ("stop_now", "stopped")]
)
def test_a_queued_run_can_be_paused_and_stopped(action: str, phase: str) -> None:
    world = World(engine_of(), RunState(phase="queued"))
    world.apply(ev.Controlled(action, "operator 'ada'", "too much"))
    world.tick()
    assert phase == world.state.phase
    world.apply(ev.Admitted())
    assert phase == world.state.phase, "its turn comes too late"
    world.apply(ev.Controlled("resume"))
    assert ("waiting" if action == "pause" else "stopped") == world.state.phase


def test_old_runs_and_surplus_runs_are_deleted_the_oldest_first() -> None:
    now = 100 * DAY_SECONDS
    runs = [Ended(f"day{day}", day * DAY_SECONDS) for day in (90, 10, 99, 50)]
    assert ["day10", "day50"] == to_delete(runs, now, 30, 0)
    assert ["day10", "day50", "day90"] == to_delete(runs, now, 0, 1)
    assert ["day10", "day50"] == to_delete(runs, now, 45, 3)
    assert [] == to_delete(runs, now, 0, 0)
    assert ["day10", "day50", "day90", "day99"] == too_old(runs, now, 0)


def test_a_run_that_ended_just_now_stays_for_who_fetches_it() -> None:
    now = 100 * DAY_SECONDS
    runs = [Ended("new", now - 10), Ended("newer", now - 5)]
    assert [] == to_delete(runs, now, 0.0001, 1)
