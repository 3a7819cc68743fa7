"""The engine's rules for tests of models, which go on beside the next round: in the order of the rounds, one
model at a time. One client tests it on the data set's test data, and each client on data of its own."""

from __future__ import annotations

from dataclasses import replace

from fedel.client_tests import OwnScore, client_tests
from fedel.core.timing import full_step
from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.gate_session import objection_to_own_score, objection_to_score
from fedel.roles.run_state import Evaluation, Member, OwnTests
from fedel.roles.secure_turn import SecureTurn


class ModelTests(SecureTurn):
    def start_test(self) -> None:
        """Of the oldest model that waits for one. A record that needs none is closed."""
        if not self.state.committed or self.state.evaluation is not None or self.state.own_tests is not None:
            return None
        record, rounds = self.state.committed[0], self.rounds
        handover = self.state.handover
        is_last = record.round + 1 == handover.round_num and self.planner.is_over(handover)
        # It holds nobody up at first: it may take its time.
        seconds = max(record.deadline_seconds, rounds.deadline_floor_seconds)
        deadline = self.now + min(seconds, rounds.max_deadline_seconds)
        if self.planner.own_tests_due(record.round, is_last):
            holders = frozenset(m.client for m in self.state.present if m.num_held_out)
            self.set(replace(self.state, own_tests=OwnTests(deadline, holders)))
        if not self.planner.evaluation_due(record.round, is_last):
            return self.close(None)
        self.set(replace(self.state, evaluation=Evaluation(deadline)))
        if self.tests_itself:
            self.do(ef.Evaluate("", record.version))
        return None

    def test_again(self) -> None:
        """Who has tested a model gives the same answer again."""
        self.set(replace(self.state, evaluation=None, own_tests=None))
        self.start_test()

    def find_testers(self) -> None:
        """Give out the tests that nobody has."""
        self._find_evaluator()
        self._ask_for_own_tests()

    def _find_evaluator(self) -> None:
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
            self.do(ef.Evaluate(best, self.state.committed[0].version))
        return None

    def _fitness(self, member: Member) -> tuple[int, bool, bool, float]:
        open_round, client = self.state.open, member.client
        missed = self.state.missed_tests.get(client, 0)
        untried = self.state.handover.accepted_round(client) < 0
        is_busy = open_round is not None and client in open_round.tasks and client not in open_round.done
        is_busy = is_busy or client in self.state.handover.at_work
        return missed, untried, is_busy, full_step(member.profile).total("train")

    def pass_test_deadlines(self) -> None:
        """Give up tests whose time is up."""
        evaluation, own = self.state.evaluation, self.state.own_tests
        if own is not None and own.waiting and self.now >= own.deadline:
            self._give_up_own(own.waiting)
        if evaluation is not None and not evaluation.answered and self.now >= evaluation.deadline:
            self._miss_test(evaluation.evaluator)

    def test_deadlines(self) -> list[float]:
        """When to look at the tests again."""
        evaluation, own = self.state.evaluation, self.state.own_tests
        found = [evaluation.deadline] if evaluation is not None and not evaluation.answered else []
        return [*found, own.deadline] if own is not None and own.waiting else found

    def _miss_test(self, client: str) -> None:
        """Who had the test gets no other until it answers or joins again."""
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
                self.do(ef.Ignore(event.client, "a test of a model that it was not asked for", "evaluation"))
                return
            if objection := objection_to_score(event.accuracy, event.loss, event.seconds):
                self.do(ef.Ignore(event.client, f"a test of a model: {objection}", "evaluation"))
                self.free_evaluator(event.client, unfit=True)
                return
        if best is None or event.accuracy > best:
            self.set(replace(self.state, evaluation=replace(evaluation, answered=True)))
            self.do(ef.Keep(event.version, event))
        else:
            self.close(event)

    def kept(self, event: ev.Kept) -> None:
        evaluation = self.state.evaluation
        if self._is_oldest(event.version) and not (evaluation is not None and evaluation.over):
            self.close(event.score, is_best=True)

    # On clients' own data

    def _ask_for_own_tests(self) -> None:
        """Of every client that is connected and was not asked; others are waited for while they may come."""
        own = self.state.own_tests
        if own is None:
            return
        if gone := own.waiting - {member.client for member in self.state.present}:
            self._give_up_own(gone)
            own = self.state.own_tests
        if own is None:
            return
        members = self.state.members
        for client in sorted(own.waiting - own.asked):
            if members[client].connected:
                own = replace(own, asked=own.asked | {client})
                self.do(ef.AskOwnTest(client, self.state.committed[0].version))
        self.set(replace(self.state, own_tests=own))

    def free_tester(self, client: str) -> None:
        """Its session broke: its test is anybody's; for that on its own data it is asked again."""
        self.free_evaluator(client)
        own = self.state.own_tests
        if own is not None and client in own.asked:
            self.set(replace(self.state, own_tests=replace(own, asked=own.asked - {client})))

    def own_tested(self, event: ev.OwnTested) -> None:
        own, client = self.state.own_tests, event.client
        if own is None or not self._is_oldest(event.version) or client in own.scores:
            return  # it came twice, or too late
        if client not in own.waiting:
            self.do(ef.Ignore(client, "a test on its own data that it was not asked for", "evaluation"))
            return
        member = self.state.members[client]
        score = event.accuracy, event.loss, event.seconds, event.num_samples
        if objection := event.problem or objection_to_own_score(*score, member):
            self.do(ef.Ignore(client, f"a test on its own data: {objection}", "evaluation"))
            self._give_up_own(frozenset({client}))
            return
        num_samples = min(event.num_samples, self.rounds.max_samples)
        mine = OwnScore(client, member.device_type, event.accuracy, event.loss, num_samples)
        self._set_own(replace(own, waiting=own.waiting - {client}, scores={**own.scores, client: mine}))

    def _give_up_own(self, clients: frozenset[str]) -> None:
        own = self.state.own_tests
        assert own is not None
        missing = own.num_missing + len(clients)
        self._set_own(replace(own, waiting=own.waiting - clients, num_missing=missing))

    def _set_own(self, own: OwnTests) -> None:
        self.set(replace(self.state, own_tests=own))
        evaluation = self.state.evaluation
        if not own.waiting and evaluation is not None and evaluation.over:
            self._close_and_go_on()

    # Closing

    def _is_oldest(self, version: int) -> bool:
        """Whether the version is the one in test."""
        committed = self.state.committed
        return bool(committed) and committed[0].version == version

    def close(self, score: ev.Evaluated | None, is_best: bool = False) -> None:
        """The test of the oldest model is over. Its round closes once clients have tested on their own data."""
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
        evaluation = Evaluation(self.now, answered=True, over=True, is_best=score is not None and is_best)
        self.set(replace(self.state, committed=(record, *rest), evaluation=evaluation))
        if self.state.own_tests is None or not self.state.own_tests.waiting:
            self._close_and_go_on()

    def _close_and_go_on(self) -> None:
        self._close_oldest()
        self.start_test()

    def close_untested(self) -> None:
        """The run ends: no record is lost."""
        while self.state.committed:
            self._close_oldest()

    def _close_oldest(self) -> None:
        record, *rest = self.state.committed
        own, evaluation = self.state.own_tests, self.state.evaluation
        if own is not None:
            missing = own.num_missing + len(own.waiting)
            record = replace(record, client_tests=client_tests(list(own.scores.values()), missing))
        is_best = evaluation is not None and evaluation.is_best
        best_version = record.version if is_best else None
        self.set(replace(self.state, committed=tuple(rest), evaluation=None, own_tests=None))
        if best_version is not None:
            self.set(replace(self.state, best_accuracy=record.accuracy, best_version=best_version))
        self.do(ef.Persist("closed", record=record, best_version=best_version), ef.Close(record))
