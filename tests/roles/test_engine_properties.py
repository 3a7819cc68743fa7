"""Any order of events, with restarts and a failing disk at any point, gives legal records, and ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fedel.roles import events as ev
from tests.roles.world import CLIENTS, World, engine_of, member_of

ROUNDS = st.fixed_dictionaries(
    {
        "num_rounds": st.integers(1, 4),
        "num_participants": st.sampled_from([0, 1, 2]),
        "over_select": st.sampled_from([1.0, 2.0]),
        "min_clients": st.integers(1, 2),
        "min_reports": st.integers(0, 1),
        "late": st.sampled_from(["refuse", "next", "weigh"]),
        "max_staleness": st.integers(1, 3),
        "evaluate_every": st.integers(0, 2),
    }
)
CLIENT = st.sampled_from(CLIENTS)
ROUND = st.integers(-1, 4)

Move = Callable[[World], object]


def moves() -> st.SearchStrategy[tuple[str, Move]]:
    """Something that happens: named, and done to a world."""

    def of_client(name: str, act: Callable[[World, str], object]) -> st.SearchStrategy[tuple[str, Move]]:
        return CLIENT.map(lambda client: (f"{name} {client}", lambda world: act(world, client)))

    def applied(name: str, make: Callable[[str], ev.Event]) -> st.SearchStrategy[tuple[str, Move]]:
        return of_client(name, lambda world, client: world.apply(make(client)))

    def plain(name: str, act: Move) -> st.SearchStrategy[tuple[str, Move]]:
        return st.just((name, act))

    progress = [
        of_client("is done", lambda world, client: world.finish_task(client)),
        plain("tick", lambda world: world.tick()),
        plain("answer", lambda world: world.answer()),
        st.floats(0, 1).map(lambda a: (f"tested {a:g}", lambda world: world.evaluate(a))),
        plain("all join", lambda world: [world.apply(ev.Joined(member_of(c))) for c in CLIENTS[:3]]),
        plain("all answers", lambda world: [world.answer() for _ in range(3)]),
        plain("all are done", lambda world: [world.finish_task(c) for c in CLIENTS]),
        plain("all behave", lambda world: [world.behave() for _ in range(3)]),
        plain("all but the tests", lambda world: [train_on(world) for _ in range(3)]),
    ]
    return st.one_of(
        *progress,
        *progress,
        *progress,
        applied("joins", lambda c: ev.Joined(member_of(c, can_evaluate=c != CLIENTS[1]))),
        applied("leaves", ev.Left),
        applied("is cut off", ev.Disconnected),
        applied("is lost", ev.Lost),
        applied("is found", ev.Found),
        applied("is withheld", partial(ev.Withheld, withheld=True)),
        applied("is given back", partial(ev.Withheld, withheld=False)),
        st.tuples(CLIENT, ROUND).map(
            lambda cr: (f"declines {cr}", lambda world: world.apply(ev.Declined(*cr, "no")))
        ),
        st.tuples(CLIENT, ROUND).map(
            lambda cr: (f"fails {cr}", lambda world: world.apply(ev.Failed(*cr, "broken")))
        ),
        st.tuples(CLIENT, CLIENT, ROUND).map(lambda ccr: (f"claims {ccr}", lambda world: world.claim(*ccr))),
        st.floats(0, 30).map(lambda s: (f"tick {s:g} s", lambda world: world.tick(s))),
        plain("answer twice", lambda world: world.answer(keep=True)),
        st.sampled_from(["pause", "resume"]).map(
            lambda action: (action, lambda world: world.apply(ev.Controlled(action)))
        ),
        plain("trouble", lambda world: world.apply(ev.Stuck("the disk of an aggregator is gone"))),
        plain("disk full", lambda world: world.apply(ev.Tick(), store_fails=True)),
        plain("restart", lambda world: world.restart()),
    )


def train_on(world: World) -> None:
    """Rounds go on while nobody answers a test."""
    for client in CLIENTS:
        world.finish_task(client)
    world.tick()
    world.answer_all()
    world.tick()


ANY_ORDER = given(
    rounds=ROUNDS,
    strategy=st.sampled_from(["fedavg", "fedel"]),
    script=st.lists(moves(), min_size=20, max_size=80),
)


def check_any_order(rounds: dict[str, object], strategy: str, script: list[tuple[str, Move]]) -> None:
    world = World(engine_of(strategy, **rounds))
    for client in CLIENTS[:2]:
        world.apply(ev.Joined(member_of(client)))
    for _, move in script:
        move(world)
    closed = len(world.closed)
    world.run_to_the_end()
    assert "finished" == world.state.phase, world.state.message
    assert rounds["num_rounds"] == len(world.closed)
    least = max(1, rounds["min_reports"])
    assert all(record.num_updates >= least for record in world.closed), ", ".join(name for name, _ in script)
    assert [] == world.engine.apply(world.state, ev.Tick(), world.now)[1]
    event(f"{closed} rounds closed in disorder")
    event(f"{sum(record.tested for record in world.closed)} rounds tested")
    event(f"{world.num_applied // 25 * 25} events or more")


@settings(max_examples=120, deadline=None)
@ANY_ORDER
def test_any_order_of_events_ends_well(rounds, strategy, script) -> None:
    check_any_order(rounds, strategy, script)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@ANY_ORDER
def test_any_order_of_events_ends_well_at_length(rounds, strategy, script) -> None:
    check_any_order(rounds, strategy, script)


@settings(max_examples=60, deadline=None)
@given(rounds=ROUNDS, script=st.lists(moves(), max_size=30), stop_at=st.integers(0, 30))
def test_a_stopped_run_ends(rounds: dict[str, object], script: list[tuple[str, Move]], stop_at: int) -> None:
    world = World(engine_of(**rounds))
    for number, (_, move) in enumerate(script):
        if number == stop_at:
            world.apply(ev.Controlled("stop"))
        move(world)
    world.run_to_the_end()
    assert world.state.phase in ("finished", "stopped")


@settings(max_examples=60, deadline=None)
@given(rounds=ROUNDS, script=st.lists(moves(), max_size=30))
def test_a_run_that_is_stopped_at_once_is_over(
    rounds: dict[str, object], script: list[tuple[str, Move]]
) -> None:
    world = World(engine_of(**rounds))
    for _, move in script:
        move(world)
    world.apply(ev.Controlled("stop_now"))
    assert world.state.phase in ("finished", "stopped")
    assert world.state.open is None
