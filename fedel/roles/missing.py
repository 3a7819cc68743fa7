"""Which clients a run misses, and why, for people."""

from __future__ import annotations

from dataclasses import replace

from fedel.roles.gate import clean
from fedel.roles.run_state import Member, OpenRound, RunState

MAX_NAMED = 3
"""Clients that a message names."""
MAX_UNREADY = 100
"""Clients that could not join, and of whom a run knows it."""
MAX_REASON = 300
"""Letters of one client's reason in a message."""


def noted(state: RunState, client: str, why: str) -> RunState:
    """The client could not join; the newest are kept."""
    unready = {name: text for name, text in state.unready.items() if name != client}
    kept = list(unready.items())[1 - MAX_UNREADY :]
    return replace(state, unready=dict([*kept, (client, clean(why, MAX_REASON))]))


def without(state: RunState, client: str) -> RunState:
    """The client has joined."""
    if client not in state.unready:
        return state
    return replace(state, unready={name: why for name, why in state.unready.items() if name != client})


def _named(state: RunState) -> str:
    """Who is not there, the first few of them; goes behind what the run waits for."""
    found = [f"{client} could not join: {why}" for client, why in sorted(state.unready.items())]
    found += [
        f"{member.client} {_why(member)}"
        for member in state.in_order
        if not member.present and member.client not in state.unready
    ]
    more = [f"and {len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
    return "".join(f"; {text}" for text in found[:MAX_NAMED] + more)


def _why(member: Member) -> str:
    if member.withheld:
        return "is cordoned, or left out by the job's clients"
    return "has left" if member.has_left else "is silent"


def reasons(open_round: OpenRound) -> str:
    """What happened to the clients of a round, the first few of them."""
    told = [f"'{client}': {why}" for client, why in sorted(open_round.lost.items())[:MAX_NAMED]]
    silent = sorted(open_round.tasks.keys() - open_round.lost.keys() - open_round.done)
    told += [f"'{client}' did not answer" for client in silent[: MAX_NAMED - len(told)]]
    return ": " + ", ".join(told) if told else ""


def waits_for(num_missing: int, state: RunState) -> str:
    """What a run without an open round waits for; empty if it has enough clients."""
    if num_missing <= 0:
        return ""
    return f"waits for {num_missing} more client{'s'[: num_missing > 1]}{_named(state)}"


def overdue(open_round: OpenRound, min_reports: int) -> str:
    """What a round waits for after its deadline; empty before."""
    if not open_round.overdue:
        return ""
    num_done = len(open_round.done)
    return f"{num_done} of {min_reports} reports at the deadline; waits for more{reasons(open_round)}"


def too_few(state: RunState, min_reports: int) -> str:
    """If fewer clients are here than an open round needs to close; empty if there are enough."""
    if len(state.present) >= min_reports:
        return ""
    done = state.open.done if state.open else frozenset()
    num_here = len(done | {member.client for member in state.present})
    if num_here >= min_reports:
        return ""
    return f"a round needs {min_reports} updates (rounds.min_reports), and {num_here} can come"
