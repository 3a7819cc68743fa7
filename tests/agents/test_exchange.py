"""The agent in secure aggregation: attempts that replace each other, messages that come twice or too late."""

from __future__ import annotations

from typing import Any

from fedel_edge.agent_state import AgentState, Effect, GiveUp, Send, Start
from fedel_edge.joined_runs import JoinedRun, identity_of

from fedel.job import RunConfig
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import task_pb2
from fedel.v1.coordinator_pb2 import SessionRequest, SessionResponse
from tests.agents.test_agent_state import DONE, RUN, kinds, offer_of, receive, started
from tests.strategies.fakes import fleet

KEYS = SessionRequest(keys=pb.SecureKeys(run=RUN))


def joined() -> AgentState:
    state, offer = AgentState(), offer_of()
    receive(state, run=offer)
    config = RunConfig.parse({"protection": {"secure": True}})
    run: Any = JoinedRun(offer.run, identity_of(offer), config, None, fleet()["client-0"], None, None)  # type: ignore[arg-type]
    state.prepared(run)
    return state


def order(state: AgentState, attempt: int) -> list[Effect]:
    work = task_pb2.LocalWork(num_steps=1, batch_size=1, optimiser="sgd")
    effects = state.receive(SessionResponse(task=task_pb2.Task(run=RUN, work=work, attempt=attempt)))
    return effects[1:]  # without the answer that accepts it


def test_repeated_task_repeats_what_was_said() -> None:
    state = joined()
    task = started(order(state, 5))
    assert [] == order(state, 5)
    task.exchange.said = KEYS
    assert [Send(KEYS)] == order(state, 5)
    state.settled(task, DONE)
    assert [Send(DONE)] == order(state, 5)


def test_new_attempt_does_not_disturb_training() -> None:
    state = joined()
    task = started(order(state, 5))
    before = task.exchange._side.keys
    assert [] == order(state, 6)
    assert 6 == task.exchange.attempt
    assert before != task.exchange._side.keys


def test_new_attempt_starts_what_was_said_or_done_again() -> None:
    state = joined()
    first = started(order(state, 5))
    first.exchange.said = KEYS
    effects = order(state, 6)
    assert [GiveUp, Start] == kinds(effects)
    second = started(effects)
    assert (first, 6) == (effects[0].assignment, second.exchange.attempt)
    state.settled(second, DONE)
    assert [GiveUp, Start] == kinds(order(state, 7))
    assert [] == [effect for effect in order(state, 6) if isinstance(effect, Start)]


def test_messages_of_other_attempts_are_nothing() -> None:
    state = joined()
    assert [] == receive(state, roster=pb.SecureRoster(run=RUN, attempt=5))
    exchange = started(order(state, 5)).exchange
    receive(state, roster=pb.SecureRoster(run=RUN, attempt=4))
    receive(state, group=pb.SecureGroup(run=RUN, round_num=1, attempt=5))
    assert exchange._rosters.empty()
    assert exchange._groups.empty()
    for _ in range(3):
        receive(state, roster=pb.SecureRoster(run=RUN, attempt=5))
    assert 1 == exchange._rosters.qsize()


def test_reveals_nothing_of_strangers() -> None:
    state = joined()
    started(order(state, 5))
    (answer,) = receive(state, unmask=pb.SecureUnmask(run=RUN, attempt=5, came=["client-1"]))
    assert "reveals shares once" in answer.message.failed.message
