"""What the round engine does for one message does not depend on how many clients there are."""

from __future__ import annotations

from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.run_state import TaskResult
from tests.roles.world import CLIENTS, World, engine_of, member_of, report_of


def test_a_report_changes_nothing_that_all_clients_are_looked_through_for() -> None:
    world = World(engine_of())
    for client in CLIENTS:
        world.apply(ev.Joined(member_of(client)))
    world.apply(ev.Tick())
    before = world.state
    effects = world.apply(ev.Done(CLIENTS[0], TaskResult(report_of(CLIENTS[0], 0))))
    after = world.state
    assert before.open is not None
    assert after.open is not None
    assert after.open.done == {CLIENTS[0]}
    assert after.members is before.members
    assert after.open.plan is before.open.plan
    assert after.open.tasks is before.open.tasks
    assert not [effect for effect in effects if isinstance(effect, ef.Wait)]
