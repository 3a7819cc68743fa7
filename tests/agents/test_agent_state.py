"""What the agent decides, without an agent: messages in, effects out."""

from __future__ import annotations

from typing import Any

import pytest
from fedel_edge.agent_state import (
    AgentState,
    DropUpdates,
    Effect,
    GiveUp,
    Join,
    Prepare,
    RemoveFolder,
    Send,
    Start,
)
from fedel_edge.joined_runs import JoinedRun, identity_of
from hypothesis import given
from hypothesis import strategies as st

from fedel.job import RunConfig
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import task_pb2
from fedel.v1.coordinator_pb2 import SessionRequest, SessionResponse
from tests.strategies.fakes import fleet

RUN = "night"


def offer_of(instance: str = "1", address: str = "old:1") -> pb.RunOffer:
    return pb.RunOffer(run=RUN, instance=instance, model_digest="d", shards=[pb.Shard(address=address)])


def run_of(offer: pb.RunOffer, late: str = "refuse", evaluator: Any = max) -> JoinedRun:
    """As much of a run as decisions look at."""
    config, trainer = RunConfig.parse({"rounds": {"late": late}}), fleet()["client-0"]
    return JoinedRun(offer.run, identity_of(offer), config, None, trainer, evaluator, None)  # type: ignore[arg-type]


def joined(**options: Any) -> tuple[AgentState, JoinedRun]:
    state, offer = AgentState(), offer_of()
    receive(state, run=offer)
    run = run_of(offer, **options)
    state.prepared(run)
    return state, run


def receive(state: AgentState, **message: Any) -> list[Effect]:
    return state.receive(SessionResponse(**message))


def order(state: AgentState, round_num: int) -> list[Effect]:
    work = task_pb2.LocalWork(num_steps=1, batch_size=1, optimiser="sgd")
    return receive(state, task=task_pb2.Task(run=RUN, round_num=round_num, work=work))


def evaluate(state: AgentState, version: int) -> list[Effect]:
    return receive(state, evaluate=pb.EvaluationTask(run=RUN, model_version=version))


def close(state: AgentState, round_num: int, counted: bool = False) -> list[Effect]:
    return receive(state, closed=pb.RoundClosed(run=RUN, round_num=round_num, counted=counted))


def started(effects: list[Effect]) -> Any:
    (start,) = [effect for effect in effects if isinstance(effect, Start)]
    return start.assignment


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def answers(effects: list[Effect]) -> list[bool]:
    return [e.message.answer.accepted for e in effects if isinstance(e, Send) and e.message.HasField("answer")]


DONE = SessionRequest(done=pb.TaskDone(run=RUN))
FAILED = SessionRequest(failed=pb.TaskFailed(run=RUN, message="odd"))


def test_new_offer_is_prepared_then_joined() -> None:
    state, offer = AgentState(), offer_of()
    assert [Prepare(offer)] == receive(state, run=offer)
    run = run_of(offer)
    assert [Join(run, offer.shards)] == state.prepared(run)


def test_known_run_joins_at_once_with_new_addresses() -> None:
    state, run = joined()
    started(order(state, 0))
    moved = offer_of(address="new:2")
    assert [Join(run, moved.shards)] == receive(state, run=moved)


def test_outcomes_are_repeated_on_joining_again() -> None:
    state, run = joined()
    state.settled(started(order(state, 0)), DONE)
    assert [Join(run, offer_of().shards), Send(DONE)] == receive(state, run=offer_of())


def test_offer_during_preparation_only_replaces_addresses() -> None:
    state, moved = AgentState(), offer_of(address="new:2")
    receive(state, run=offer_of())
    assert [] == receive(state, run=moved)
    run = run_of(offer_of())
    assert [Join(run, moved.shards)] == state.prepared(run)


def test_another_instance_starts_over() -> None:
    state, _ = joined()
    task = started(order(state, 0))
    second = offer_of(instance="2")
    assert [GiveUp(task), Prepare(second)] == receive(state, run=second)
    assert [False] == answers(order(state, 1)), "not joined until it is prepared"
    assert [] == state.prepared(run_of(offer_of())), "the first instance is no longer wanted"
    assert [Join] == kinds(state.prepared(run_of(second)))


def test_run_that_ends_during_preparation_is_removed() -> None:
    state, offer = AgentState(), offer_of()
    receive(state, run=offer)
    receive(state, ended=pb.RunEnded(run=RUN))
    run = run_of(offer)
    assert [RemoveFolder(run)] == state.prepared(run)
    assert [False] == answers(order(state, 0))


def test_failed_preparation_is_tried_again_on_the_next_offer() -> None:
    state, offer = AgentState(), offer_of()
    receive(state, run=offer)
    assert [Send(FAILED)] == state.not_prepared(offer, FAILED)
    assert [Prepare(offer)] == receive(state, run=offer)


def test_old_failure_does_not_stop_a_newer_preparation() -> None:
    state, second = AgentState(), offer_of(instance="2")
    receive(state, run=offer_of())
    receive(state, run=second)
    state.not_prepared(offer_of(), FAILED)
    assert [Join] == kinds(state.prepared(run_of(second)))


def test_task_of_unknown_run_is_declined() -> None:
    effects = order(AgentState(), 0)
    assert [Send] == kinds(effects)
    assert [False] == answers(effects)


def test_task_is_accepted_and_started() -> None:
    state, run = joined()
    effects = order(state, 3)
    assert [True] == answers(effects)
    assert (run, 3) == (started(effects).run, started(effects).number)


def test_repeated_task_is_not_started_twice() -> None:
    state, _ = joined()
    task = started(order(state, 0))
    again = order(state, 0)
    assert ([Send], [True]) == (kinds(again), answers(again))
    state.settled(task, DONE)
    assert Send(DONE) == order(state, 0)[-1]


def test_newer_task_supersedes() -> None:
    state, _ = joined()
    first = started(order(state, 0))
    effects = order(state, 1)
    assert [Send, GiveUp, Start] == kinds(effects)
    assert GiveUp(first) == effects[1]


def test_failed_task_drops_its_update() -> None:
    state, run = joined()
    task = started(order(state, 4))
    assert [DropUpdates(run, 4), Send(FAILED)] == state.settled(task, FAILED)
    assert Send(FAILED) == order(state, 4)[-1], "it is not tried again"


@pytest.mark.parametrize(
    ("late", "counted", "over"),
    [
        ("refuse", False, 5),
        ("refuse", True, 5),
        ("next", False, 4),
        ("next", True, 5),
        ("weigh", False, 1),
        ("weigh", True, 5),
    ],
)
def test_closed_round_is_given_up_unless_late_updates_count(late: str, counted: bool, over: int) -> None:
    state, run = joined(late=late)
    task = started(order(state, 5))
    expected = [GiveUp(task), DropUpdates(run, 5)] if over == 5 else [DropUpdates(run, over)]
    assert expected == close(state, 5, counted)


def test_closed_round_leaves_a_newer_task() -> None:
    state, run = joined()
    order(state, 6)
    assert [DropUpdates(run, 5)] == close(state, 5)


def test_evaluation_and_task_are_independent() -> None:
    state, _ = joined()
    order(state, 0)
    assert [Start] == kinds(evaluate(state, 0))
    assert [GiveUp, Start] == kinds(evaluate(state, 1))


def test_failed_evaluation_is_tried_again() -> None:
    state, _ = joined()
    assert [Send(FAILED)] == state.settled(started(evaluate(state, 2)), FAILED)
    assert [Start] == kinds(evaluate(state, 2))


def test_evaluation_without_evaluator_is_a_failure() -> None:
    state, _ = joined(evaluator=None)
    (effect,) = evaluate(state, 0)
    assert isinstance(effect, Send)
    assert "cannot evaluate run 'night'" in effect.message.failed.message


def test_ended_run_is_removed_and_refused_one_is_kept() -> None:
    for message, last in (
        ({"ended": pb.RunEnded(run=RUN)}, [RemoveFolder]),
        ({"refused": pb.JoinRefused(run=RUN)}, []),
    ):
        state, _ = joined()
        order(state, 0)
        evaluate(state, 0)
        assert [GiveUp, GiveUp, *last] == kinds(receive(state, **message))
        assert [False] == answers(order(state, 1))


STEPS = st.one_of(
    st.tuples(st.just("offer"), st.integers(1, 2)),
    st.tuples(st.just("prepared"), st.integers(1, 2)),
    st.tuples(st.just("task"), st.integers(0, 3)),
    st.tuples(st.just("evaluate"), st.integers(0, 3)),
    st.tuples(st.just("closed"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["ended", "refused", "settle", "fail"]), st.just(0)),
)


@given(st.lists(STEPS, max_size=30))
def test_any_order_of_messages(steps: list[tuple[str, int]]) -> None:
    """At most one task and one evaluation are under way; nothing is given up twice."""
    state, working = AgentState(), []
    for what, number in steps:
        offer = offer_of(str(number))
        if what == "offer":
            effects = receive(state, run=offer)
        elif what == "prepared":
            effects = state.prepared(run_of(offer))
        elif what == "task":
            effects = order(state, number)
        elif what == "evaluate":
            effects = evaluate(state, number)
        elif what == "closed":
            effects = close(state, number)
        elif what == "ended":
            effects = receive(state, ended=pb.RunEnded(run=RUN))
        elif what == "refused":
            effects = receive(state, refused=pb.JoinRefused(run=RUN))
        else:
            done = working.pop(0) if working else None
            effects = state.settled(done, DONE if what == "settle" else FAILED) if done else []
        for effect in effects:
            if isinstance(effect, GiveUp) and effect.assignment in working:
                working.remove(effect.assignment)
            elif isinstance(effect, GiveUp):
                assert effect.assignment.outcome is not None, "given up twice"
            elif isinstance(effect, Start):
                working.append(effect.assignment)
        tasks = [a for a in working if isinstance(a.message, task_pb2.Task)]
        assert len(tasks) <= 1
        assert len(working) - len(tasks) <= 1
