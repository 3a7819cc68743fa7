"""One event on its way through the engine: the state as it changes, and the effects as they add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedel.roles.effects import Effect, Persist
from fedel.roles.run_state import OpenRound, RunState


class Turn:
    """The paper that the rules in ``coordinator.py`` write on."""

    def __init__(self, state: RunState, now: float) -> None:
        self.state = state
        self.now = now
        self.effects: list[Effect] = []

    def do(self, *effects: Effect) -> None:
        self.effects.extend(effects)

    def set(self, state: RunState) -> None:
        self.state = state

    def set_open(self, open_round: OpenRound) -> None:
        self.state = replace(self.state, open=open_round)

    def set_phase(self, phase: str, message: str = "") -> None:
        self.state = replace(self.state, phase=phase, message=message)
        self.do(Persist("phase"))

    def change_member(self, client: str, **changes: Any) -> None:
        member = self.state.members.get(client)
        if member is not None:
            self.state = self.state.with_member(replace(member, **changes))

    def is_at(self, open_round: OpenRound, status: str, round_num: int) -> bool:
        """Whether an answer is the one that the open round waits for; one that comes twice is not."""
        return open_round.status == status and open_round.round_num == round_num
