"""The engine's rules for what did not work, and for what a person wants: rounds with too few updates, and runs
that are held, paused, resumed and stopped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from fedel.core.secure_sum import MIN_GROUP
from fedel.errors import ServiceError
from fedel.roles import events as ev
from fedel.roles.gate import DIVERGED
from fedel.roles.missing import reasons
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_state import (
    FINISHED,
    HELD,
    OPEN,
    PAUSED,
    QUEUED,
    RUNNING,
    SEALED,
    STOPPED,
    STOPPING,
    STOPS,
    TRIES_AGAIN,
    WAITING,
    OpenRound,
    RunState,
)
from fedel.roles.secure_round import UPLOAD
from fedel.roles.turn import Turn
from fedel.types import Participant, Report, Task

MISSING = "it said that it was done, but its update is missing"
SILENT = "it has not been heard for too long"


class RepeatingTurn(Turn, ABC):
    def __init__(
        self, planner: RoundPlanner, tests_itself: bool, relays: bool, state: RunState, now: float
    ) -> None:
        super().__init__(state, now)
        self.planner = planner
        self.rounds = planner.run.rounds
        self.tests_itself = tests_itself
        self.relays = relays
        self.min_reports = max(MIN_GROUP if relays else 1, self.rounds.min_reports)
        """No model is made of nothing, and no secure sum of fewer clients than hide each other."""

    # Who may send an update

    def participants(self) -> tuple[Participant, ...]:
        """The clients of the open round, and those whose update of an earlier round would still count."""
        open_round, state = self.state.open, self.state
        assert open_round is not None
        return tuple(
            self.planner.participant(task, state.members[task.client].num_samples)
            for task in (*open_round.plan.tasks, *state.handover.at_work.values())
            if task.client in state.members
        )

    def open_shards(self) -> None:
        """Name the participants to the aggregators: they take updates of nobody else."""
        open_round = self.state.open
        assert open_round is not None
        secure = open_round.secure
        if not self.relays:
            self.do(ev.Open(open_round.round_num, self.participants()))
        elif secure is not None and secure.step == UPLOAD:
            sending = tuple(each for each in self.participants() if each.client in secure.shares)
            self.do(ev.Open(open_round.round_num, sending, secure.attempt))

    def send_tasks(self, clients: Iterable[str]) -> None:
        open_round = self.state.open
        assert open_round is not None
        for client in clients:
            if client not in open_round.done:
                self.send_task(open_round.tasks[client])

    def send_task(self, task: Task) -> None:
        open_round, handover = self.state.open, self.state.handover
        left = max(0.0, open_round.deadline - self.now) if open_round else 0.0
        attempt = open_round.secure.attempt if open_round and open_round.secure else 0
        accepted, memory = handover.accepted_round(task.client), handover.memory(task.client)
        self.do(ev.SendTask(task, accepted, memory, left, attempt))

    # Rounds with too few updates

    def without_update(self, held: Sequence[Report]) -> dict[str, str]:
        """Clients that said they were done, while not every aggregator has their update."""
        assert self.state.open is not None
        return dict.fromkeys(sorted(self.state.open.done - {report.client for report in held}), MISSING)

    def reopen(self, held: Sequence[Report], lost: dict[str, str]) -> None:
        """Too few updates are there: the aggregators keep them and take more."""
        open_round = self.state.open
        assert open_round is not None
        if self.state.phase == STOPPING:
            return self.interrupt()
        done = frozenset(report.client for report in held) & open_round.tasks.keys()
        seals = open_round.seals + 1
        self.set_open(replace(open_round, status=OPEN, sealed_at=0.0, done=done, lost=lost, seals=seals))
        self.do(ev.Persist("plan"))
        return self.open_shards()

    def give_up(self, open_round: OpenRound) -> None:
        """The round got too few updates again and again: somebody has to look."""
        if self.all_diverged(open_round):
            return self.hold(
                f"{self.divergence(open_round)}, {open_round.repeats + 1} times (rounds.max_repeats)"
            )
        return self.hold(
            f"round {open_round.round_num + 1} got {len(open_round.done)} of {self.min_reports} updates in"
            f" {open_round.repeats + 1} deadlines of {open_round.plan.deadline_seconds:.0f} s"
            f" (rounds.max_repeats){reasons(open_round)}"
        )

    def all_diverged(self, open_round: OpenRound) -> bool:
        """Whether the training of every client that is here diverged: there is nothing to wait for.

        One that has no task yet may do better: a client that only says so hurries nobody into a pause.
        """
        members, lost = self.state.members, open_round.lost
        return not self.relays and all(
            DIVERGED in lost.get(client, "") and client in members and members[client].connected
            for client in chain(open_round.tasks, (member.client for member in self.state.present))
        )

    def divergence(self, open_round: OpenRound) -> str:
        """Which clients' training diverged in the round, for people; empty if it did for none."""
        names = [client for client, why in open_round.lost.items() if DIVERGED in why]
        if not names:
            return ""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        why = open_round.lost[names[0]]
        return (
            f"round {open_round.round_num + 1}: the training of client '{names[0]}'{more} diverged: lower"
            f" work.lr ({why})"
        )

    # Runs that are held

    def hold(self, reason: str) -> None:
        """Wait until a person resumes the run; a run that is to stop anyway stops."""
        if self.state.phase == STOPPING:
            said = self._stopped(f"in round {self.state.handover.round_num + 1}")
            return self.end(STOPPED, f"{said}: {reason}")
        return self.set_phase(HELD, f"{reason}; {TRIES_AGAIN}")

    def go_on(self) -> None:
        """Ask again for what the run waits for."""
        self.test_again()
        open_round = self.state.open
        if open_round is None:
            return
        # The deadline passes at once: who is done counts, and who is idle gets the work (again).
        self.set_open(replace(open_round, deadline=self.now, repeats=0))
        self.ask_again(open_round)

    def ask_again(self, open_round: OpenRound) -> None:
        """Aggregators give the same answer again."""
        secure = open_round.secure
        if self.relays and (secure is None or secure.opened is None):
            self.new_attempt()
        elif open_round.status == SEALED:
            self.do(ev.Seal(open_round.round_num, open_round.seals))
        else:
            self.open_shards()

    @abstractmethod
    def test_again(self) -> None:
        """Have the oldest committed model tested again; in ``model_tests.py``."""

    @abstractmethod
    def close_untested(self) -> None:
        """Close the records that wait for a test; in ``model_tests.py``."""

    @abstractmethod
    def new_attempt(self) -> None:
        """Try secure aggregation again from its first step; in ``secure_turn.py``."""

    # What a person wants

    def control(self, event: ev.Controlled) -> None:
        phase, who = self.state.phase, f" by {event.by}" if event.by else ""
        why = f": {event.why}" if event.why else ""
        if event.action.startswith("stop"):
            self._stop(f"stopped{who}{why}{STOPS}", at_once=event.action == "stop_now")
        elif phase == STOPPING:
            raise ServiceError("the run is stopping: create a new run to continue training")
        elif event.action == "pause" and phase != HELD:
            who = who or " by an operator"
            self.set_phase(PAUSED, f"paused{who}{why}; `fedel runs resume` goes on")
        elif event.action == "resume" and phase in (PAUSED, HELD):
            begun = self.state.open is not None or self.state.handover.round_num > 0
            self.set_phase(RUNNING if begun else WAITING)
            if phase == HELD:
                self.go_on()

    def admit(self) -> None:
        """Its turn has come, unless somebody stopped or paused it meanwhile."""
        if self.state.phase == QUEUED:
            self.set_phase(WAITING)

    def _stop(self, message: str, at_once: bool) -> None:
        was_held = self.state.phase == HELD
        if at_once:
            self.set(replace(self.state, phase=STOPPING, message=message))
            return self.interrupt()
        self.set_phase(STOPPING, message)
        return self.go_on() if was_held else None

    def _stopped(self, when: str) -> str:
        """Who stopped the run, when and why: the message of a run that stops holds the rest."""
        message = self.state.message.removesuffix(STOPS)
        is_known = self.state.phase == STOPPING and message.startswith("stopped")
        who, colon, why = message.partition(": ") if is_known else ("stopped", "", "")
        return f"{who} {when}{colon}{why}"

    def interrupt(self) -> None:
        """End the run at once; the open round is given up."""
        if self.state.open is None:
            return self.end_in_order(is_last=False)
        return self.end(
            STOPPED, self._stopped(f"in round {self.state.handover.round_num + 1}, which was not closed")
        )

    def end_in_order(self, is_last: bool) -> None:
        """No round is open: all are done, or somebody stopped the run."""
        done = self.state.handover.round_num
        when = f"after round {done}" if done else "before its first round"
        self.end(*(FINISHED,) if is_last else (STOPPED, self._stopped(when)))

    def end(self, phase: str, message: str = "") -> None:
        self.close_untested()
        self.set(replace(self.state, open=None))
        self.set_phase(phase, message)
        self.do(ev.End(phase, message))
