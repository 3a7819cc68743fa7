"""What the agent decides on each message: which run to join, which task to take up, answer again, or give up.

No waiting, no thread, no file, no clock: a message or a result comes in, effects come out, and ``agent.py``
carries them out in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fedel.errors import UpdateRefused
from fedel.roles.gate import MAX_NAME, clean
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import task_pb2
from fedel.v1.coordinator_pb2 import SessionRequest, SessionResponse
from fedel_edge import gate
from fedel_edge.exchange import Exchange
from fedel_edge.gate import Limits
from fedel_edge.joined_runs import JoinedRun, identity_of


@dataclass(eq=False)
class Assignment:
    """The newest task or the newest evaluation of a run, kept until its round is closed."""

    run: JoinedRun
    message: task_pb2.Task | pb.EvaluationTask
    outcome: SessionRequest | None = None
    """What was answered; sent again if the coordinator asks again."""
    exchange: Exchange | None = None
    """With secure aggregation."""

    @property
    def number(self) -> int:
        """Round of a task, model version of an evaluation."""
        message = self.message
        return message.round_num if isinstance(message, task_pb2.Task) else message.model_version


@dataclass(frozen=True)
class Send:
    message: SessionRequest


@dataclass(frozen=True)
class Prepare:
    """Build the run's model, data and profile, then call ``prepared`` or ``not_prepared``."""

    offer: pb.RunOffer


@dataclass(frozen=True)
class Join:
    """Use these aggregators from now on, and send a join."""

    run: JoinedRun
    shards: Sequence[pb.Shard]


@dataclass(frozen=True)
class Start:
    """Begin the work, then call ``settled`` with its outcome."""

    assignment: Assignment


@dataclass(frozen=True)
class GiveUp:
    """End the work: nobody wants its result."""

    assignment: Assignment


@dataclass(frozen=True)
class DropUpdates:
    """Delete stored updates of this round and earlier ones."""

    run: JoinedRun
    up_to: int


@dataclass(frozen=True)
class RemoveFolder:
    """Delete everything that is kept of the run."""

    run: JoinedRun


@dataclass(frozen=True)
class Measure:
    """Measure the timing profile of the run again, once the device is idle."""

    run: JoinedRun


Effect: TypeAlias = Send | Prepare | Join | Start | GiveUp | DropUpdates | RemoveFolder | Measure


class AgentState:
    """The runs this agent takes part in and its assignments in them."""

    def __init__(self, client: str = "", slowdown: float = 1.0, limits: Limits | None = None) -> None:
        self._client, self._slowdown, self._limits = client, slowdown, limits or Limits()
        self._runs: dict[str, JoinedRun] = {}
        self._preparing: dict[str, pb.RunOffer] = {}
        """The newest offer of each run that is being prepared."""
        self._tasks: dict[str, Assignment] = {}
        self._evaluations: dict[str, Assignment] = {}
        self._own_tests: dict[str, Assignment] = {}

    def receive(self, message: SessionResponse) -> list[Effect]:
        kind = message.WhichOneof("kind")
        if kind == "run":
            return self._offered(message.run)
        if kind == "task":
            return self._task(message.task)
        if kind == "evaluate":
            return self._evaluate(message.evaluate)
        if kind == "closed":
            return self._closed(message.closed)
        if kind == "ended":
            return self._ended(message.ended.run)
        if kind == "refused":
            return self._forget(message.refused.run)
        if kind == "roster":
            return self._secure(message.roster)
        if kind == "group":
            return self._secure(message.group)
        if kind == "unmask":
            return self._secure(message.unmask)
        if kind == "profile":
            return self._profile()
        return []

    @property
    def names(self) -> frozenset[str]:
        """The runs that are joined or being prepared."""
        return frozenset((*self._runs, *self._preparing))

    def wants(self, offer: pb.RunOffer) -> bool:
        """Whether this offer is still to be prepared."""
        newest = self._preparing.get(offer.run)
        return newest is not None and identity_of(newest) == identity_of(offer)

    def prepared(self, run: JoinedRun) -> list[Effect]:
        """The run is built: join it with the newest addresses, if it is still the one on offer."""
        offer = self._preparing.get(run.name)
        if offer is None:
            return [RemoveFolder(run)]  # it ended in the meantime
        if identity_of(offer) != run.identity:
            return []  # another run of that name is being prepared
        del self._preparing[run.name]
        if wrong := gate.objection_to_shards(offer.shards, run.trainer.spec):
            return [RemoveFolder(run), _refused(run.name, wrong)]
        self._runs[run.name] = run
        return [Join(run, offer.shards)]

    def not_prepared(self, offer: pb.RunOffer, failure: SessionRequest) -> list[Effect]:
        """The next offer of the run tries again."""
        if self.wants(offer):
            del self._preparing[offer.run]
        return [Send(failure)]

    def settled(self, assignment: Assignment, outcome: SessionRequest) -> list[Effect]:
        """The work ended, well or not."""
        run, failed = assignment.run, outcome.WhichOneof("kind") == "failed"
        assignment.outcome = outcome
        if failed and self._evaluations.get(run.name) is assignment:
            del self._evaluations[run.name]  # if the coordinator asks again, it is tried again
        if failed and isinstance(assignment.message, task_pb2.Task):
            return [DropUpdates(run, assignment.number), Send(outcome)]
        return [Send(outcome)]

    def _offered(self, offer: pb.RunOffer) -> list[Effect]:
        """Every session begins with offers, so that most are of runs that are known: join them again, at once.

        The aggregators may have moved, and an upload that is under way needs their new addresses.
        """
        wrong = gate.objection_to_offer(offer)
        run, num_others = self._runs.get(offer.run), len(self.names - {offer.run})
        if not wrong and run is not None and run.identity == identity_of(offer):
            wrong = gate.objection_to_shards(offer.shards, run.trainer.spec)
        if not wrong and num_others >= self._limits.max_runs:
            wrong = (
                f"this device takes part in {num_others} others, and limits.max_runs = {self._limits.max_runs}"
            )
        if wrong:
            return [_refused(offer.run, wrong)]
        if run is not None and run.identity == identity_of(offer):
            answered = [a.outcome for a in self._assignments(run.name) if a.outcome is not None]
            return [Join(run, offer.shards), *map(Send, answered)]
        if self.wants(offer):
            self._preparing[offer.run] = offer
            return []
        given_up = self._forget(offer.run)
        self._preparing[offer.run] = offer
        return [*given_up, Prepare(offer)]

    def _task(self, task: task_pb2.Task) -> list[Effect]:
        run = self._runs.get(task.run)
        if run is None:
            wrong = f"this agent has not joined run '{clean(task.run, MAX_NAME)}'"
        else:
            wrong = gate.objection_to_task(
                task, self._client, run.config, run.trainer, self._slowdown, self._limits
            )
        name = clean(task.run, MAX_NAME)
        answer = pb.TaskAnswer(run=name, round_num=task.round_num, accepted=not wrong, reason=wrong)
        if run is None or wrong:
            return [Send(SessionRequest(answer=answer))]
        assignment = Assignment(run, task)
        if run.config.protection.secure:
            assignment.exchange = Exchange(self._client, task.round_num, task.attempt)
        return [Send(SessionRequest(answer=answer)), *_take_up(self._tasks, assignment)]

    def _secure(self, message: pb.SecureRoster | pb.SecureGroup | pb.SecureUnmask) -> list[Effect]:
        """Only of the attempt that this agent is at."""
        task = self._tasks.get(message.run)
        exchange = task.exchange if task else None
        if task is None or exchange is None or (task.number, exchange.attempt) != _about(message):
            return []
        try:
            answer = exchange.hear(message)
        except UpdateRefused as error:
            failed = pb.TaskFailed(run=task.run.name, round_num=task.number, message=clean(str(error)))
            return [Send(SessionRequest(failed=failed))]
        return [Send(answer)] if answer else []

    def _evaluate(self, task: pb.EvaluationTask) -> list[Effect]:
        run = self._runs.get(task.run)
        wrong = gate.objection_to_evaluation(task)
        if run is None or run.test_of(task.own) is None:
            wrong = f"this agent cannot evaluate run '{clean(task.run, MAX_NAME)}'"
        elif wrong:
            wrong = f"the evaluation is refused: {wrong}"
        if run is None or wrong:
            return [_cannot_test(task, wrong) if task.own else _failed(task.run, wrong)]
        return _take_up(self._own_tests if task.own else self._evaluations, Assignment(run, task))

    def _closed(self, closed: pb.RoundClosed) -> list[Effect]:
        run, task = self._runs.get(closed.run), self._tasks.get(closed.run)
        if run is None:
            return []
        # Where late updates count, the work on one goes on for as many rounds as it may be late.
        over = closed.round_num - (0 if closed.counted else run.config.rounds.staleness.max_rounds)
        effects: list[Effect] = []
        if task is not None and task.number <= over:
            effects.append(GiveUp(self._tasks.pop(closed.run)))
        return [*effects, DropUpdates(run, over)]

    def _profile(self) -> list[Effect]:
        """However often it is asked, each profile is measured once."""
        runs = [run for run in self._runs.values() if not run.is_asked_to_measure]
        for run in runs:
            run.is_asked_to_measure = True
        return [Measure(run) for run in runs]

    def takes_part(self, run: JoinedRun) -> bool:
        return self._runs.get(run.name) is run

    def _ended(self, name: str) -> list[Effect]:
        run, given_up = self._runs.get(name), self._forget(name)
        return given_up if run is None else [*given_up, RemoveFolder(run)]

    def _forget(self, name: str) -> list[Effect]:
        given_up: list[Effect] = [GiveUp(assignment) for assignment in self._assignments(name)]
        self._runs.pop(name, None)
        self._preparing.pop(name, None)
        self._tasks.pop(name, None)
        self._evaluations.pop(name, None)
        self._own_tests.pop(name, None)
        return given_up

    def _assignments(self, name: str) -> list[Assignment]:
        return [known[name] for known in (self._tasks, self._evaluations, self._own_tests) if name in known]


def _failed(run: str, message: str) -> Send:
    """An answer about the run as a whole, not about a round of it."""
    name = clean(run, MAX_NAME)
    return Send(SessionRequest(failed=pb.TaskFailed(run=name, round_num=-1, message=clean(message))))


def own_test_failed(task: pb.EvaluationTask, problem: str) -> SessionRequest:
    """An answer about a test on own data: the run goes on without it."""
    done = pb.EvaluationDone(
        run=clean(task.run, MAX_NAME), model_version=task.model_version, own=True, problem=clean(problem)
    )
    return SessionRequest(evaluation=done)


def _cannot_test(task: pb.EvaluationTask, problem: str) -> Send:
    return Send(own_test_failed(task, problem))


def _refused(run: str, wrong: str) -> Send:
    return _failed(run, f"this agent does not join run '{clean(run, MAX_NAME)}': {wrong}")


def _about(message: pb.SecureRoster | pb.SecureGroup | pb.SecureUnmask) -> tuple[int, int]:
    return message.round_num, message.attempt


def _is_lost(before: Assignment, again: Assignment) -> bool:
    """Whether the attempt of secure aggregation that is under way was given up for another one."""
    old, new = before.exchange, again.exchange
    if old is None or new is None or new.attempt <= old.attempt:
        return False
    if old.said is None and before.outcome is None:
        old.renew(new.attempt)  # it still trains, and has said nothing to anyone
        return False
    return True


def _take_up(newest: dict[str, Assignment], assignment: Assignment) -> list[Effect]:
    """A new assignment supersedes the one before; one that is repeated is answered again once it is done."""
    name, before = assignment.run.name, newest.get(assignment.run.name)
    if before is not None and before.number == assignment.number and not _is_lost(before, assignment):
        said = before.outcome or (before.exchange.said if before.exchange else None)
        return [] if said is None else [Send(said)]
    newest[name] = assignment
    return [Start(assignment)] if before is None else [GiveUp(before), Start(assignment)]
