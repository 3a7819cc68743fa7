"""The engine's rules from the answer to the seal of a round to its record: commit, test, close."""

from __future__ import annotations

from dataclasses import replace

from fedel.core.timing import full_step
from fedel.records import RoundRecord
from fedel.roles import events as ev
from fedel.roles.gate_session import objection_to_score
from fedel.roles.recorder import bare_record, round_record
from fedel.roles.repeating import SILENT
from fedel.roles.run_state import FAILED, SEALED, Evaluation, Member, OpenRound
from fedel.roles.secure_turn import SecureTurn
from fedel.roles.speed import learned
from fedel.types import AS_PROFILED, PLAN_PACE, Speed, Task


class ClosingTurn(SecureTurn):
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
        return self.do(ev.Commit(event.round_num, tuple(report.client for report in held)))

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
        self.do(ev.Persist("committed", record=record))
        counted = {report.client: report.round_num for report in open_round.reports}
        for client in sorted(open_round.tasks.keys() | state.handover.at_work.keys() | counted.keys()):
            self.do(ev.SendClosed(client, counted.get(client, event.round_num), client in counted))
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

    # Tests, beside the next round: in the order of the rounds, one at a time

    def start_test(self) -> None:
        """Of the oldest model that waits for one. A record that needs none is closed."""
        if not self.state.committed or self.state.evaluation is not None:
            return None
        record, rounds = self.state.committed[0], self.rounds
        handover = self.state.handover
        is_last = record.round + 1 == handover.round_num and self.planner.is_over(handover)
        if not self.planner.evaluation_due(record.round, is_last):
            return self.close(None)
        # It holds nobody up at first: it may take its time.
        seconds = max(record.deadline_seconds, rounds.deadline_floor_seconds)
        deadline = self.now + min(seconds, rounds.max_deadline_seconds)
        self.set(replace(self.state, evaluation=Evaluation(deadline)))
        if self.tests_itself:
            self.do(ev.Evaluate("", record.version))
        return None

    def test_again(self) -> None:
        """Who has tested a model gives the same answer again."""
        self.set(replace(self.state, evaluation=None))
        self.start_test()

    def find_evaluator(self) -> None:
        """Give the test to a client that can do it; without one, close the round untested.

        First come those that answered all their tests, then those of whom an update counted: one that only
        joined and never does anything holds up no round. Of these, one without a task, and then the fastest.
        """
        evaluation = self.state.evaluation
        if evaluation is None or evaluation.answered or evaluation.evaluator or self.tests_itself:
            return None
        able = [m for m in self.state.present if m.can_evaluate and m.client not in evaluation.unfit]
        if not able:
            return self.close(None)
        ready = [member for member in able if member.connected]
        if ready:
            best = min(ready, key=self._fitness).client
            self.set(replace(self.state, evaluation=replace(evaluation, evaluator=best)))
            self.do(ev.Evaluate(best, self.state.committed[0].version))
        return None

    def _fitness(self, member: Member) -> tuple[int, bool, bool, float]:
        open_round, client = self.state.open, member.client
        missed = self.state.missed_tests.get(client, 0)
        untried = self.state.handover.accepted_round(client) < 0
        is_busy = open_round is not None and client in open_round.tasks and client not in open_round.done
        is_busy = is_busy or client in self.state.handover.at_work
        return missed, untried, is_busy, full_step(member.profile).total("train")

    def miss_test(self, client: str) -> None:
        """The time for a test is up. Who had it gets no other until it answers or joins again."""
        if client:
            self.change_member(client, can_evaluate=False)
            missed = {**self.state.missed_tests, client: self.state.missed_tests.get(client, 0) + 1}
            self.set(replace(self.state, missed_tests=missed))
        self.close(None)

    def free_evaluator(self, client: str, *, unfit: bool = False) -> bool:
        """Whether the client had the test, which is now anybody else's; also its own unless it is unfit."""
        evaluation = self.state.evaluation
        if evaluation is None or evaluation.answered or not client or evaluation.evaluator != client:
            return False
        failed = evaluation.unfit | {client} if unfit else evaluation.unfit
        self.set(replace(self.state, evaluation=replace(evaluation, evaluator="", unfit=failed)))
        return True

    def evaluated(self, event: ev.Evaluated) -> None:
        if event.client in self.state.missed_tests:
            self.change_member(event.client, can_evaluate=True)
        evaluation, best = self.state.evaluation, self.state.best_accuracy
        if evaluation is None or evaluation.answered or not self._is_oldest(event.version):
            return  # tested already: the answer came twice, or too late
        if not self.tests_itself:
            if not event.client or event.client != evaluation.evaluator:
                self.do(ev.Ignore(event.client, "a test of a model that it was not asked for", "evaluation"))
                return
            if objection := objection_to_score(event.accuracy, event.loss, event.seconds):
                self.do(ev.Ignore(event.client, f"a test of a model: {objection}", "evaluation"))
                self.free_evaluator(event.client, unfit=True)
                return
        if best is None or event.accuracy > best:
            self.set(replace(self.state, evaluation=replace(evaluation, answered=True)))
            self.do(ev.Keep(event.version, event))
        else:
            self.close(event)

    def kept(self, event: ev.Kept) -> None:
        if self._is_oldest(event.version):
            self.close(event.score, is_best=True)

    def _is_oldest(self, version: int) -> bool:
        """Whether the version is the one in test."""
        committed = self.state.committed
        return bool(committed) and committed[0].version == version

    def close(self, score: ev.Evaluated | None, is_best: bool = False) -> None:
        """Close the oldest committed round, and go on to test the model of the next."""
        self._close_oldest(score, is_best)
        self.start_test()

    def close_untested(self) -> None:
        """The run ends: no record is lost."""
        while self.state.committed:
            self._close_oldest(None, is_best=False)

    def _close_oldest(self, score: ev.Evaluated | None, is_best: bool) -> None:
        record, *rest = self.state.committed
        if score is not None:
            tested = {"evaluate": score.seconds} if score.seconds is not None else {}
            record = replace(
                record,
                accuracy=score.accuracy,
                test_loss=score.loss,
                evaluate_seconds=score.seconds,
                exit_accuracies=score.exit_accuracies,
                phases={**record.phases, **tested},
            )
        best_version = score.version if score is not None and is_best else None
        self.set(replace(self.state, committed=tuple(rest), evaluation=None))
        if best_version is not None:
            self.set(replace(self.state, best_accuracy=record.accuracy, best_version=best_version))
        self.do(ev.Persist("closed", record=record, best_version=best_version), ev.Close(record))
