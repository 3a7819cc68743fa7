"""The round engine: the coordinator without clock, network, files or threads.

``apply(state, event, now)`` gives the next state and the effects to carry out, in order. Everything that is
*decided* about a run is decided here: who trains, who is lost, what is late, when a round is sealed, what is
recorded. The driver only waits: the coordinator service for real messages and a real clock, the simulation for
virtual arrivals. ``apply`` is a pure function: where its effects could not be made durable, the event is
applied again to the old state.
"""

from __future__ import annotations

from dataclasses import replace

from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.closing import ClosingTurn
from fedel.roles.gate_session import objection_to_result
from fedel.roles.missing import noted, overdue, too_few, waits_for, without
from fedel.roles.planner import RoundPlanner
from fedel.roles.repeating import MISSING, SILENT
from fedel.roles.run_state import (
    HELD,
    MAX_COMMITTED,
    OPEN,
    PAUSED,
    QUEUED,
    RUNNING,
    SEALED,
    STOPPING,
    WAITING,
    Member,
    OpenRound,
    RunState,
    TaskResult,
)
from fedel.roles.secure_round import UPLOAD
from fedel.roles.speed import believed
from fedel.types import Task


class RoundEngine:
    """The rules of one run."""

    def __init__(self, planner: RoundPlanner, *, tests_itself: bool = False, relays: bool = False) -> None:
        """With ``tests_itself`` the driver tests models, otherwise a client does. With ``relays`` the clients
        of secure aggregation mask their updates themselves, and the driver carries their messages."""
        self.planner = planner
        self.run = planner.run
        self.spec = planner.spec
        self.tests_itself = tests_itself
        self._relays = relays and planner.run.protection.secure

    def apply(self, state: RunState, event: ev.Event, now: float) -> tuple[RunState, list[ef.Effect]]:
        """``ServiceError`` refuses a person's wish; the state is then as it was."""
        if state.ended:
            return state, []
        turn = _Turn(self.planner, self.tests_itself, self._relays, state, now)
        turn.take(event)
        return turn.state, turn.effects


class _Turn(ClosingTurn):
    """The rules up to the seal.

    What others report are facts, which are only noted; ``Settle`` and ``Tick``, the driver's own events, draw
    conclusions, and say what the run waits for. So a message of an agent costs at most one small write to the
    database, and no look at all clients.
    """

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.Settle() | ev.Tick() if self.state.phase == HELD:
                pass
            case ev.Settle():
                self._settle()
                self.find_testers()
            case ev.Tick():
                self._settle()
                self._tick()
                self.find_testers()  # once it is known who trains in the next round
            case ev.Restarted():
                self._restarted()
            case ev.Joined(member):
                self._joined(member)
            case ev.Left(client):
                self._leave(client, "it left")
            case ev.Disconnected(client):
                self.change_member(client, connected=False)
                self.free_tester(client)
            case ev.Lost(client):
                self._silent(client)
            case ev.Found(client):
                self._found(client)
            case ev.Withheld(client, withheld):
                self.change_member(client, withheld=withheld)
            case ev.Forgotten(client):
                self._forget(client)
            case ev.Accepted():
                pass
            case ev.Declined(client, round_num, reason):
                self._lose(client, round_num, f"it declined: {reason}")
            case ev.Done():
                self._done(event)
            case ev.Failed():
                self._failed(event)
            case ev.Keyed():
                self.keyed(event)
            case ev.Shared():
                self.shared(event)
            case ev.Revealed():
                self.revealed(event)
            case ev.Sealed():
                self.sealed(event)
            case ev.Committed():
                self.committed(event)
            case ev.Evaluated():
                self.evaluated(event)
            case ev.OwnTested():
                self.own_tested(event)
            case ev.Kept():
                self.kept(event)
            case ev.Controlled():
                self.control(event)
            case ev.Admitted():
                self.admit()
            case ev.CloseNow():
                self._seal()
            case ev.Interrupted():
                self.interrupt()
            case ev.Stuck(reason):
                self.hold(reason)
        if not self.state.ended and not isinstance(event, ev.FACTS):
            self.do(self._wait())

    # Facts

    def _joined(self, member: Member) -> None:
        """What the client missed is sent to it. A new profile needs no correction learned of the old one."""
        known, handover = self.state.members.get(member.client), self.state.handover
        if known is not None and known.profile != member.profile and member.client in handover.speeds:
            speed = replace(handover.speeds[member.client], slowness=1.0, probe_slowness=1.0)
            speeds = {**handover.speeds, member.client: speed}
            self.set(replace(self.state, handover=replace(handover, speeds=speeds)))
        self.set(without(self.state.with_member(replace(member, connected=True)), member.client))
        self.do(ef.Persist("member", member.client))
        self.free_tester(member.client)  # a test that it had went to its older session
        open_round = self.state.open
        late = self.state.handover.at_work.get(member.client)
        if open_round is not None and open_round.status == OPEN and member.client in open_round.tasks:
            self._expect(member.client)
            self.send_tasks([member.client])
        elif late is not None and member.client not in self.state.late_results:
            self.send_task(late)
        self.resend(only=member.client)

    def _leave(self, client: str, why: str) -> None:
        if client in self.state.members:
            self.change_member(client, has_left=True)
            self.do(ef.Persist("member", client))
            self.free_tester(client)
            self._give_up_late(client)
            if self.state.open is not None:
                self._lose(client, self.state.open.round_num, why)

    def _give_up_late(self, client: str, round_num: int | None = None) -> None:
        """The client's task of an earlier round, or of this one, will not be done."""
        handover = self.state.handover
        late = handover.at_work.get(client)
        if late is not None and round_num in (None, late.round_num):
            at_work = {name: task for name, task in handover.at_work.items() if name != client}
            self.set(replace(self.state, handover=replace(handover, at_work=at_work)))

    def _silent(self, client: str) -> None:
        """The open round does not wait for it; heard again before the seal, it counts like any other."""
        self.change_member(client, silent=True)
        self.free_tester(client)
        if self.state.open is not None:
            self._lose(client, self.state.open.round_num, SILENT)

    def _found(self, client: str) -> None:
        self.change_member(client, silent=False)
        open_round = self.state.open
        if open_round is not None and open_round.status == OPEN and open_round.lost.get(client) == SILENT:
            self._expect(client)

    def _expect(self, client: str) -> None:
        """Wait for a client that was lost."""
        assert self.state.open is not None
        lost = {name: why for name, why in self.state.open.lost.items() if name != client}
        self.set_open(replace(self.state.open, lost=lost))

    def _forget(self, client: str) -> None:
        state, open_round = self.state, self.state.open
        known = client in state.handover.at_work or (open_round is not None and client in open_round.tasks)
        if client in state.members and not known and state.handover.accepted_round(client) < 0:
            members = {name: member for name, member in state.members.items() if name != client}
            self.set(replace(state, members=members))
            self.do(ef.Persist("forgotten", client))

    def _lose(self, client: str, round_num: int, why: str) -> None:
        """Do not wait for the client in the open round."""
        self._give_up_late(client, round_num)
        open_round = self.state.open
        if open_round is None or open_round.status != OPEN or open_round.round_num != round_num:
            return
        if client in open_round.tasks and client not in open_round.done:
            self.set_open(replace(open_round, lost={**open_round.lost, client: why}))

    def _done(self, event: ev.Done) -> None:
        client, report = event.client, event.result.report
        next_round = self.state.handover.round_num
        newest = self.state.open.round_num if self.state.open else next_round - 1
        if report.client != client or not 0 <= report.round_num <= newest:
            return self.do(ef.Ignore(client, f"a report of client '{report.client}', round {report.round_num}"))
        task = self._task_of(client, report.round_num)
        if task is not None and client in self.state.members:
            self._take_result(task, event.result)
        elif report.round_num == next_round:
            self.do(ef.Ignore(client, f"a report of round {report.round_num}: it has no task there"))
        if report.round_num < next_round:
            counted = self.state.handover.accepted_round(client) == report.round_num
            self.do(ef.SendClosed(client, report.round_num, counted))
        return None

    def _take_result(self, task: Task, result: TaskResult) -> None:
        client = task.client
        participant = self.planner.participant(task, self.state.members[client].num_samples)
        if objection := objection_to_result(result, self.planner.spec, participant):
            self.do(ef.Ignore(client, f"a report of round {task.round_num}: {objection}"))
            self._lose(client, task.round_num, f"its report cannot be used: {objection}")
        else:
            self.do(ef.Persist("result", client, result=result))
            self._note(client, result)

    def _task_of(self, client: str, round_num: int) -> Task | None:
        """The task that a report of the client would answer."""
        open_round, late = self.state.open, self.state.handover.at_work.get(client)
        if open_round is not None and round_num == open_round.round_num:
            return open_round.tasks.get(client)
        return late if late is not None and late.round_num == round_num else None

    def _note(self, client: str, result: TaskResult) -> None:
        """Keep what a client measured; its update is what the aggregators have."""
        open_round, report = self.state.open, result.report
        if open_round is None or report.round_num != open_round.round_num:
            self.set(replace(self.state, late_results={**self.state.late_results, client: result}))
        else:
            open_round = replace(open_round, results={**open_round.results, client: result})
            self.set_open(open_round)
        if open_round is None:
            return
        # Who claimed an update that is not there is believed again when the round gives it the task again.
        believed_again = open_round.lost.get(client) != MISSING
        secure = open_round.secure
        is_asked = not self.relays or (secure is not None and secure.step == UPLOAD and client in secure.shares)
        if open_round.status == OPEN and is_asked and client in open_round.tasks and believed_again:
            self.set_open(replace(open_round, done=open_round.done | {client}))
            self._expect(client)

    def _failed(self, event: ev.Failed) -> None:
        if event.round_num >= 0:
            self._lose(event.client, event.round_num, event.message)
        elif not self.free_evaluator(event.client, unfit=True) and event.client not in self.state.missed_tests:
            self._leave(event.client, event.message)
            self.set(noted(self.state, event.client, event.message))

    def _restarted(self) -> None:
        members = {name: replace(m, connected=False, silent=False) for name, m in self.state.members.items()}
        self.set(replace(self.state, members=members, evaluation=None, own_tests=None))
        if self.state.phase != HELD:
            self.start_test()
        open_round = self.state.open
        if open_round is None:
            return
        # The deadline starts again: an outage of ours is not held against the clients.
        deadline = self.now + open_round.plan.deadline_seconds
        self.set_open(replace(open_round, deadline=deadline, repeats=0, lost={}))
        if self.state.phase != HELD:
            self.ask_again(open_round)

    # A round from its opening to its end

    def _tick(self) -> None:
        open_round = self.state.open
        self.pass_test_deadlines()
        if open_round is None:
            self._open()
        elif open_round.status == OPEN and self.now >= open_round.deadline:
            self._pass_deadline(open_round)
        elif open_round.status == SEALED and open_round.secure and self.now >= open_round.deadline:
            self.pass_step(open_round, open_round.secure)

    def _settle(self) -> None:
        """What follows from the facts without any time passing."""
        open_round = self.state.open
        if open_round is None:
            return
        if self.relays and self.settle_secure(open_round, due=False):
            return
        if open_round.status == OPEN and self._is_enough(open_round):
            self._seal()
        elif open_round.status == OPEN and self.all_diverged(open_round):
            self._pass_deadline(open_round)

    def _open(self) -> None:
        """Plan the next round once enough clients are here; the plan is kept before anyone receives it."""
        state = self.state
        is_last = self.planner.is_over(state.handover)
        if is_last or state.phase == STOPPING:
            return None if state.committed else self.end_in_order(is_last)
        if state.phase in (PAUSED, QUEUED) or self._num_missing() > 0 or len(state.committed) >= MAX_COMMITTED:
            return None
        handover = state.handover
        views = believed(state.present, handover.speeds)
        idle = {view.name for view in views} - handover.at_work.keys()
        # If nobody else is here, clients give up what they are late with.
        plan = self.planner.plan(handover, views, handover.at_work.keys() if idle else ())
        if not plan.tasks:
            name = self.planner.strategy.name
            return self.hold(f"strategy '{name}' planned no task for {len(views)} clients")
        if state.phase == WAITING:
            self.set_phase(RUNNING)
        deadline = self.now + plan.deadline_seconds
        secure = self.first_attempt()
        self.set_open(OpenRound(state.handover.round_num, plan, self.now, deadline, secure=secure))
        self.do(ef.Persist("plan"))
        self.open_shards()
        self.send_tasks(task.client for task in plan.tasks)
        return None

    def _num_missing(self) -> int:
        wanted = self.rounds.min_clients if self.state.handover.round_num == 0 else 1
        return wanted - len(self.state.present)

    def _is_enough(self, open_round: OpenRound) -> bool:
        if self.relays:
            return open_round.secure is not None and self.has_all_updates(open_round, open_round.secure)
        if len(open_round.done) < self.min_reports:
            return False
        expected = open_round.plan.in_one_round - open_round.lost.keys()
        return open_round.overdue or self.planner.enough(len(open_round.done & expected), len(expected))

    def _pass_deadline(self, open_round: OpenRound) -> None:
        """Close the round if enough clients are back; with too few, wait on and give the work to others too."""
        if open_round.secure is not None and self.pass_step(open_round, open_round.secure):
            return None
        if len(open_round.done) >= self.min_reports:
            return self._seal()
        if self.state.phase == STOPPING:
            return self.interrupt()
        if open_round.repeats >= self.rounds.max_repeats:
            return self.give_up(open_round)
        deadline = self.now + open_round.plan.deadline_seconds
        self.set_open(replace(open_round, repeats=open_round.repeats + 1, deadline=deadline))
        return self._reinforce()

    def _reinforce(self) -> None:
        """Give the round's work to clients that are here and have none: the others may be gone."""
        open_round = self.state.open
        assert open_round is not None
        handover = self.state.handover
        busy = (open_round.tasks.keys() - open_round.lost.keys()) | handover.at_work.keys()
        views = believed(self.state.present, handover.speeds)
        if not {view.name for view in views} - busy:
            return
        more = self.planner.plan(handover, views, busy).tasks
        fresh = {task.client for task in more}
        tasks = tuple(task for task in open_round.plan.tasks if task.client not in fresh) + more
        lost = {client: why for client, why in open_round.lost.items() if client not in fresh}
        self.set_open(replace(open_round, plan=replace(open_round.plan, tasks=tasks), lost=lost))
        self.do(ef.Persist("plan"))
        self.open_shards()
        self.send_tasks(task.client for task in more)

    def _seal(self) -> None:
        open_round = self.state.open
        if open_round is not None and open_round.status == OPEN:
            self.set_open(replace(open_round, status=SEALED, sealed_at=self.now))
            self.do(ef.Persist("sealed"), ef.Seal(open_round.round_num, open_round.seals))

    def _wait(self) -> ef.Wait:
        """What the run waits for now."""
        open_round = self.state.open
        if self.state.phase == HELD:
            return ef.Wait()
        until = self.test_deadlines()
        why = ""
        if open_round is None and self.state.phase not in (PAUSED, QUEUED):
            why = waits_for(self._num_missing(), self.state)
        elif open_round is not None and open_round.status == OPEN:
            least = self.min_reports
            told = overdue(open_round, least), too_few(self.state, least), self.divergence(open_round)
            why = "; ".join(filter(None, told))
        secure = open_round.secure if open_round else None
        is_stepping = secure is not None and secure.opened is None
        if open_round is not None and (open_round.status == OPEN or is_stepping):
            until.append(open_round.deadline)
        return ef.Wait(min(until, default=None), why)
