"""Secure aggregation in the engine: in any order of messages, with losses and restarts, sums come out right."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel.core.secure_server import take_off
from fedel.core.secure_sum import Keys, Reveal, SecureClient, attempt_name, groups_of
from fedel.errors import UpdateRefused
from fedel.job import RunConfig
from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.coordinator import RoundEngine
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_state import TaskResult
from fedel.serialisation import to_json
from tests.roles.world import CLIENTS, SPEC, World, member_of, report_of

NAMES = tuple(t.name for t in SPEC.tensors)
TRAINED = {client: NAMES[: len(NAMES) - index] for index, client in enumerate(CLIENTS)}
"""The last tensors are named by few."""


def engine_of(**rounds: object) -> RoundEngine:
    table = {
        "strategy": {"name": "fedavg"},
        "rounds": {"num_rounds": 2, "deadline_floor_seconds": 10.0, "evaluate_every": 0, **rounds},
        "protection": {"secure": True},
    }
    return RoundEngine(RoundPlanner(RunConfig.parse(table), SPEC), relays=True)


def vector(client: str, tensor: str) -> np.ndarray:
    return np.full(3, 100 * CLIENTS.index(client) + NAMES.index(tensor) + 1, np.uint64)


@dataclass
class SecureWorld(World):
    """Clients that answer when the test lets them; the aggregators hold masked sums."""

    inbox: list[ef.Effect] = field(default_factory=list)
    sides: dict[str, tuple[int, SecureClient]] = field(default_factory=dict)
    masked: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    named: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    shared: dict[str, SecureClient] = field(default_factory=dict)
    attempt: int = 0
    num_sums: int = 0

    def carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.SendTask() | ef.SendRoster() | ef.SendGroup() | ef.SendUnmask():
                self.inbox.append(effect)
            case ef.Open(attempt=attempt) if attempt != self.attempt:
                assert attempt > self.attempt
                self.attempt, self.masked, self.uploads = attempt, {}, {}
                self.sealed.pop(effect.round_num, None)
            case ef.Commit(round_num, clients, opened, attempt) if self.version == round_num:
                assert opened is not None
                assert attempt == self.attempt
                self.check_sums(opened, clients)
        super().carry_out(effect)

    def check_sums(self, opened, clients) -> None:
        assert not opened.own_masks.keys() & opened.masking_keys.keys()
        sums: dict[str, np.ndarray] = {}
        for client in clients:
            for tensor, words in self.masked[client].items():
                sums[tensor] = sums[tensor] + words if tensor in sums else words.copy()
        take_off(opened, sums)
        groups = groups_of(opened.named)
        for tensor, words in sums.items():
            expected = sum(vector(client, tensor) for client in groups[tensor] if client in clients)
            assert expected.tolist() == words.tolist()
        self.num_sums += 1

    def deliver(self, place: int = 0) -> None:
        """One message reaches its client, which answers."""
        message = self.inbox.pop(place % len(self.inbox))
        match message:
            case ef.SendTask(task, attempt=attempt):
                client = task.client
                if self.sides.get(client, (0, None))[0] < attempt:
                    name = attempt_name(task.round_num, attempt)
                    self.sides[client] = attempt, SecureClient(client, name, secrets.token_bytes)
                self.tasks[client] = message
                keys = self.sides[client][1].keys
                self.apply(ev.Keyed(client, task.round_num, attempt, keys, TRAINED[client]))
            case ef.SendRoster(client, round_num, attempt, keys, named):
                if self.side(client, attempt):
                    self.share(client, round_num, attempt, keys, named)
            case ef.SendGroup(client, round_num, attempt, shares):
                # A client that was restarted waits for a roster first.
                has_shared = self.shared.get(client) is self.side(client, attempt)
                if self.side(client, attempt) and has_shared and client not in self.masked:
                    self.mask(client, round_num, attempt, shares)
            case ef.SendUnmask(client, round_num, attempt, came):
                if self.side(client, attempt) and not self.side(client, attempt)._has_revealed:
                    reveal = self.side(client, attempt).reveal(came)
                    self.apply(ev.Revealed(client, round_num, attempt, reveal))

    def share(self, client: str, round_num: int, attempt: int, keys: Any, named: Any) -> None:
        side = self.side(client, attempt)
        assert side is not None
        self.named[client], self.shared[client] = dict(named), side
        try:
            shares = side.share(keys)
        except UpdateRefused as refusal:  # the roster has keys of before it was restarted
            self.apply(ev.Failed(client, round_num, str(refusal)))
        else:
            self.apply(ev.Shared(client, round_num, attempt, shares))

    def side(self, client: str, attempt: int) -> SecureClient | None:
        number, side = self.sides.get(client, (0, None))
        return side if number == attempt else None

    def mask(self, client: str, round_num: int, attempt: int, shares: dict[str, bytes]) -> None:
        side = self.side(client, attempt)
        assert side is not None
        side.receive(shares)
        named = {name: self.named[client][name] for name in (*shares, client)}
        words = side.mask({name: vector(client, name) for name in TRAINED[client]}, groups_of(named))
        open_round = self.state.open
        accepts = open_round is not None and open_round.status == "open" and self.version == round_num
        if accepts and attempt == self.attempt:
            self.masked[client] = words
            self.uploads[client] = report_of(client, round_num)
        self.apply(ev.Done(client, TaskResult(report_of(client, round_num), 1, 1)))

    def restart(self) -> None:
        self.inbox, self.sides = [], dict(self.sides)
        super().restart()

    def behave(self) -> None:
        for client in CLIENTS:
            member = self.state.members.get(client)
            if member is None or member.has_left or not member.connected:
                self.apply(ev.Joined(member_of(client)))
            elif member.silent:
                self.apply(ev.Found(client))
        while self.inbox or self.answers:
            while self.inbox:
                self.deliver()
            self.apply(ev.Settle())
            self.answer()
        self.tick()


def world(**rounds: object) -> SecureWorld:
    made = SecureWorld(engine_of(min_clients=len(CLIENTS), **rounds))
    made.now = 1000.0
    for client in CLIENTS:
        made.apply(ev.Joined(member_of(client)))
    made.tick()
    return made


def step_of(made: SecureWorld) -> str:
    assert made.state.open is not None
    assert made.state.open.secure is not None
    return made.state.open.secure.step


def test_everyone_stays() -> None:
    made = world()
    made.run_to_the_end()
    assert (2, "finished") == (made.num_sums, made.state.phase)


MOVES = ("deliver", "deliver", "deliver", "lose", "settle", "answer", "tick", "restart", "rejoin", "forget")


@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 30)), max_size=60))
def test_any_order(moves: list[tuple[str, int]]) -> None:
    made = world()
    for move, number in moves:
        client = CLIENTS[number % len(CLIENTS)]
        if made.state.ended:
            break
        if move == "deliver" and made.inbox:
            made.deliver(number)
        elif move == "lose":
            made.apply(ev.Lost(client))
        elif move == "settle":
            made.apply(ev.Settle())
        elif move == "answer":
            made.answer()
        elif move == "tick":
            made.tick(float(number))
        elif move == "restart":
            made.restart()
        elif move == "rejoin":
            made.apply(ev.Joined(member_of(client)))
        elif move == "forget":  # the agent is restarted: its secrets are gone
            made.sides.pop(client, None)
            made.apply(ev.Joined(member_of(client)))
    made.run_to_the_end()
    assert (2, "finished") == (made.num_sums, made.state.phase)


def until_step(made: SecureWorld, step: str) -> None:
    for _ in range(100):
        if step_of(made) == step:
            return
        if made.inbox:
            made.deliver()
        else:
            made.apply(ev.Settle())
            made.answer()
    raise AssertionError(step)


def test_too_few_stay_starts_again_with_new_keys() -> None:
    made = world()
    until_step(made, "upload")
    before = made.state.open.secure
    for client in CLIENTS[:2]:
        made.apply(ev.Lost(client))
    made.inbox = [message for message in made.inbox if message.client not in CLIENTS[:2]]
    while made.inbox:
        made.deliver()
    made.apply(ev.Settle())
    assert "keys" == step_of(made)
    assert made.state.open.secure.attempt > before.attempt
    made.run_to_the_end()
    assert 2 == made.num_sums


def test_again_and_again_pauses_with_the_reason() -> None:
    made = world(max_repeats=1)
    for _ in range(2):
        until_step(made, "shares")
        made.inbox.clear()
        made.tick(1000.0)
    assert "held" == made.state.phase
    assert "secure aggregation did not get to its end: 4 of 4 clients sent no shares" in made.state.message
    made.run_to_the_end()
    assert 2 == made.num_sums


def test_wrong_shares_start_again() -> None:
    made = world()
    until_step(made, "reveal")
    secure = made.state.open.secure
    for client in CLIENTS:
        wrong = Reveal(dict.fromkeys(secure.summed, bytes(66)))
        made.apply(ev.Revealed(client, 0, secure.attempt, wrong))
    made.apply(ev.Settle())
    assert "keys" == step_of(made)
    made.run_to_the_end()
    assert 2 == made.num_sums


def test_what_does_not_pass() -> None:
    made = world()
    made.deliver()
    known = made.state.open.secure
    (first,) = known.keys
    other = next(client for client in CLIENTS if client != first)
    effects = made.apply(ev.Keyed(other, 0, known.attempt, known.keys[first], TRAINED[other]))
    assert [other] == [effect.client for effect in effects if isinstance(effect, ef.Ignore)]
    fresh = SecureClient(other, "x", secrets.token_bytes).keys
    for stale in (
        ev.Keyed(other, 0, known.attempt - 1, fresh, ()),
        ev.Keyed(other, 1, known.attempt, fresh, ()),
    ):
        made.apply(stale)
    made.apply(ev.Keyed("stranger", 0, known.attempt, Keys(b"a", b"b", b"c"), ()))
    assert known == made.state.open.secure
    until_step(made, "shares")
    effects = made.apply(ev.Shared(first, 0, known.attempt, {other: b"x"}))
    assert [first] == [effect.client for effect in effects if isinstance(effect, ef.Ignore)]


def test_restart_before_the_reveal_starts_again_and_after_it_commits() -> None:
    made = world()
    until_step(made, "reveal")
    attempt = made.state.open.secure.attempt
    made.restart()
    assert "keys" == step_of(made)
    assert made.state.open.secure.attempt > attempt
    for client in CLIENTS:
        made.apply(ev.Joined(member_of(client)))
    until_step(made, "reveal")
    while made.inbox:
        made.deliver()
    state, _ = made.engine.apply(made.state, ev.Settle(), made.now)
    made.disk = to_json(replace(state, open=replace(state.open, secure=state.open.secure.to_store())))
    made.restart()
    made.answer()  # sealed, as before
    made.answer()
    assert 1 == made.state.handover.round_num
