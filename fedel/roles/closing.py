"""The engine's rules from the answer to the seal of a round to its record: commit, test, close."""

from __future__ import annotations

from dataclasses import replace

from fedel.core.timing import full_step
from fedel.records import RoundRecord
from fedel.roles import events as ev
from fedel.roles.gate_session import objection_to_score
from fedel.roles.recorder import bare_record, round_record
from fedel.roles.run_state import (
    COMMITTED,
    FAILED,
    SEALED,
    Evaluation,
    Member,
    OpenRound,
    PreviousRound,
)
from fedel.roles.secure_turn import SecureTurn


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
        handover = state.handover.after(open_round.plan, open_round.reports, importance)
        previous = PreviousRound(open_round.tasks, open_round.results)
        self.set(
            replace(
                state,
                handover=handover,
                open=replace(open_round, status=COMMITTED, record=record, secure=None),
                previous=previous if self.rounds.late == "next" else PreviousRound(),
                untrained_rounds=record.tensor_untrained_rounds,
            )
        )
        self.do(ev.Persist("committed", record=record))
        for client in sorted(open_round.tasks.keys() | {report.client for report in open_round.reports}):
            counted = handover.accepted_round(client) == event.round_num
            self.do(ev.SendClosed(client, event.round_num, counted))
        return self.start_evaluation()

    def _record(self, event: ev.Committed) -> RoundRecord:
        """The model is made: nothing that is only written about it may keep the round from closing."""
        try:
            return round_record(self.planner, self.state, event, self.now)
        except Exception as error:
            trouble = f"its record is incomplete: {type(error).__name__}: {error}"
            return bare_record(self.planner, self.state, event, self.now, trouble)

    def start_evaluation(self) -> None:
        open_round = self.state.open
        assert open_round is not None
        if not self.planner.evaluation_due(open_round.round_num):
            return self.close(None)
        if self.tests_itself:
            return self.do(ev.Evaluate("", open_round.round_num + 1))
        evaluation = Evaluation(self.now + open_round.plan.deadline_seconds)
        return self.set_open(replace(open_round, evaluation=evaluation))

    def find_evaluator(self, open_round: OpenRound, evaluation: Evaluation) -> None:
        """Give the test to a client that can do it; without one, close the round untested.

        First come those that answered all their tests, then those of whom an update counted: one that only
        joined and never does anything holds up no round. Of these, the fastest.
        """
        able = [m for m in self.state.present if m.can_evaluate and m.client not in evaluation.unfit]
        if not able:
            return self.close(None)
        if evaluation.evaluator:
            return None
        ready = [member for member in able if member.connected]
        if ready:
            best = min(ready, key=self._fitness).client
            self.set_open(replace(open_round, evaluation=replace(evaluation, evaluator=best)))
            self.do(ev.Evaluate(best, open_round.round_num + 1))
        return None

    def _fitness(self, member: Member) -> tuple[int, bool, float]:
        missed = self.state.missed_tests.get(member.client, 0)
        untried = self.state.handover.accepted_round(member.client) < 0
        return missed, untried, full_step(member.profile).total("train")

    def miss_test(self, client: str) -> None:
        """The time for a test is up. Who had it gets no other until it answers or joins again."""
        if client:
            self.change_member(client, can_evaluate=False)
            missed = {**self.state.missed_tests, client: self.state.missed_tests.get(client, 0) + 1}
            self.set(replace(self.state, missed_tests=missed))
        self.close(None)

    def free_evaluator(self, client: str) -> None:
        open_round = self.state.open
        evaluation = open_round.evaluation if open_round else None
        if open_round is not None and evaluation is not None and evaluation.evaluator == client:
            self.set_open(replace(open_round, evaluation=replace(evaluation, evaluator="")))

    def evaluated(self, event: ev.Evaluated) -> None:
        if event.client in self.state.missed_tests:
            self.change_member(event.client, can_evaluate=True)
        open_round, best = self.state.open, self.state.best_accuracy
        if open_round is None or not self.is_at(open_round, COMMITTED, event.version - 1):
            return
        evaluation = open_round.evaluation
        if not self.tests_itself:
            if evaluation is None:
                return  # tested already: the answer came twice
            if not event.client or event.client != evaluation.evaluator:
                self.do(ev.Ignore(event.client, "a test of a model that it was not asked for", "evaluation"))
                return
            if objection := objection_to_score(event.accuracy, event.loss, event.seconds):
                self.do(ev.Ignore(event.client, f"a test of a model: {objection}", "evaluation"))
                unfit = evaluation.unfit | {event.client}
                self.set_open(replace(open_round, evaluation=replace(evaluation, evaluator="", unfit=unfit)))
                return
        self.set_open(replace(open_round, evaluation=None))
        if best is None or event.accuracy > best:
            self.do(ev.Keep(event.version, event))
        else:
            self.close(event)

    def close(self, score: ev.Evaluated | None, is_best: bool = False) -> None:
        open_round = self.state.open
        if open_round is None or open_round.status != COMMITTED or open_round.record is None:
            return
        record = open_round.record
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
        self.set(replace(self.state, open=None))
        if best_version is not None:
            self.set(replace(self.state, best_accuracy=record.accuracy, best_version=best_version))
        self.do(ev.Persist("closed", record=record, best_version=best_version), ev.Close(record))
