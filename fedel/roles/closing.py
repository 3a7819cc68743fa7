"""The engine's rules from the answer to the seal of a round to its record, complete but for tests: commit."""

from __future__ import annotations

from dataclasses import replace

from fedel.records import RoundRecord
from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.model_tests import ModelTests
from fedel.roles.recorder import bare_record, round_record
from fedel.roles.repeating import SILENT
from fedel.roles.run_state import FAILED, SEALED, OpenRound
from fedel.roles.speed import learned
from fedel.types import AS_PROFILED, PLAN_PACE, Speed, Task


class ClosingTurn(ModelTests):
    def sealed(self, event: ev.Sealed) -> None:
        """Commit the updates that are there: to say that a task is done is not to have sent an update."""
        open_round = self.state.open
        if open_round is None or not self.is_at(open_round, SEALED, event.round_num):
            return None
        if event.attempt != open_round.seals:
            return None
        planned = {(each.client, each.round_num) for each in self.participants()}
        held = tuple(report for report in event.reports if (report.client, report.round_num) in planned)
        lost = {**open_round.lost, **self.without_update(held)}
        if self.relays:
            return self.ask_to_reveal(held, lost)
        if not event.final and len(held) < self.min_reports:
            return self.reopen(held, lost)
        self.set_open(replace(open_round, reports=held, lost=lost))
        return self.do(ef.Commit(event.round_num, tuple(report.client for report in held)))

    def committed(self, event: ev.Committed) -> None:
        """The model is made, so that the next round may open; its test goes on beside that."""
        open_round, state = self.state.open, self.state
        if open_round is None or not self.is_at(open_round, SEALED, event.round_num):
            return None
        if event.version != event.round_num + 1:
            return self.end(
                FAILED,
                f"the aggregators made version {event.version} of round {event.round_num}: they hold another"
                " run of this name; create the run under a new name",
            )
        record = self._record(event)
        importance = {t.name: event.global_importance.get(t.name, 0.0) for t in self.planner.spec.tensors}
        speeds, seconds = self._speeds(open_round), record.latency_seconds
        handover = state.handover.after(
            open_round.plan, open_round.reports, importance, speeds, seconds, self._at_work(open_round)
        )
        self.set(
            replace(
                state,
                handover=handover,
                open=None,
                committed=(*state.committed, record),
                late_results={},
                untrained_rounds=record.tensor_untrained_rounds,
            )
        )
        self.do(ef.Persist("committed", record=record))
        counted = {report.client: report.round_num for report in open_round.reports}
        for client in sorted(open_round.tasks.keys() | state.handover.at_work.keys() | counted.keys()):
            self.do(ef.SendClosed(client, counted.get(client, event.round_num), client in counted))
        return self.start_test()

    def _at_work(self, open_round: OpenRound) -> dict[str, Task]:
        """The tasks whose updates may still come, and would count in the next round.

        Not those of clients that said they were done, or that they would not be."""
        state, next_round = self.state, open_round.round_num + 1
        out = {client for client, why in open_round.lost.items() if why != SILENT}
        gone = out | open_round.results.keys() | state.late_results.keys()
        gone |= {report.client for report in open_round.reports}
        tasks = {**state.handover.at_work, **open_round.tasks}
        oldest = next_round - self.rounds.staleness.max_rounds
        return {name: task for name, task in tasks.items() if task.round_num >= oldest and name not in gone}

    def _speeds(self, open_round: OpenRound) -> dict[str, Speed]:
        """What the round's measured seconds teach; nothing where a run keeps to its plan."""
        if self.planner.pace == PLAN_PACE:
            return {}
        known, results = self.state.handover.speeds, {**self.state.late_results, **open_round.results}
        counted = {report.client for report in open_round.reports} & results.keys()
        return {client: learned(known.get(client, AS_PROFILED), results[client]) for client in sorted(counted)}

    def _record(self, event: ev.Committed) -> RoundRecord:
        """The model is made: nothing that is only written about it may keep the round from closing."""
        try:
            return round_record(self.planner, self.state, event, self.now)
        except Exception as error:
            trouble = f"its record is incomplete: {type(error).__name__}: {error}"
            return bare_record(self.planner, self.state, event, self.now, trouble)
