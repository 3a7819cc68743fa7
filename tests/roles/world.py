"""A world around the round engine: clients, aggregators and a disk, whose every move a test chooses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedel.errors import ServiceError
from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.coordinator import RoundEngine
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_state import MAX_COMMITTED, OPEN, Member, RunState, TaskResult
from fedel.serialisation import from_json, to_json
from fedel.testing import fleet, spec
from fedel.types import Report, StepCost

SPEC = spec()
CLIENTS = tuple(fleet(4))
PROFILES = {name: trainer.profile for name, trainer in fleet(4).items()}


def engine_of(strategy: str = "fedavg", **rounds: object) -> RoundEngine:
    table = {
        "strategy": {"name": strategy},
        "rounds": {"num_rounds": 3, "deadline_floor_seconds": 10.0} | rounds,
    }
    return RoundEngine(RoundPlanner(RunConfig.parse(table), SPEC))


def member_of(client: str, can_evaluate: bool = True) -> Member:
    return Member(client, 10, PROFILES[client], "fake", can_evaluate)


def report_of(client: str, round_num: int) -> Report:
    return Report(client, round_num, 10, 4, 4.0, 0.5, cost=StepCost(0.1, 0.2), train_seconds=1.0)


@dataclass
class World:
    """Carries effects out at once where the test does not decide; answers of others wait in ``answers``."""

    engine: RoundEngine
    state: RunState = field(default_factory=RunState)
    now: float = 0.0
    disk: str = ""
    """The state as it was when a part of it was last made durable."""
    closed: list[RoundRecord] = field(default_factory=list)
    """Records that are on disk as closed."""
    uploads: dict[str, Report] = field(default_factory=dict)
    """What the aggregators hold for the open round."""
    participants: set[tuple[str, int]] = field(default_factory=set)
    """Client and round of the updates that the aggregators take."""
    counted: set[tuple[str, int]] = field(default_factory=set)
    """Client and round of all updates that made a model."""
    sealed: dict[int, ev.Sealed] = field(default_factory=dict)
    version: int = 0
    answers: list[ev.Event] = field(default_factory=list)
    """What others will answer."""
    tasks: dict[str, ef.SendTask] = field(default_factory=dict)
    """The last task that each client received."""
    evaluators: list[tuple[str, int]] = field(default_factory=list)
    waits: ef.Wait = field(default_factory=ef.Wait)
    num_applied: int = 0
    train_seconds: float = 1.0
    """What every client measures while it trains."""

    def __post_init__(self) -> None:
        self.disk = to_json(self.state)
        self.max_staleness = self.engine.run.rounds.staleness.max_rounds

    def apply(self, event: ev.Event, *, store_fails: bool = False) -> list[ef.Effect]:
        """Apply an event; a store that fails leaves everything as it was."""
        try:
            state, effects = self.engine.apply(self.state, event, self.now)
        except ServiceError:
            return []
        self.num_applied += 1
        self.check_pure(event, effects)
        durable = any(isinstance(effect, ef.Persist) for effect in effects)
        if durable and store_fails:
            return []
        self.check_legal(state, effects)
        self.state = state
        if durable:
            self.disk = to_json(state)
        for effect in effects:
            self.carry_out(effect)
        return effects

    def check_pure(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        """The same state gives the same effects, also when it was on disk in between."""
        loaded = from_json(RunState, to_json(self.state), "disk")
        assert loaded == self.state
        assert effects == self.engine.apply(loaded, event, self.now)[1]

    def check_legal(self, state: RunState, effects: list[ef.Effect]) -> None:
        sealed = state.open is not None and state.open.status != OPEN
        num_closed = len(self.closed)
        for effect in effects:
            match effect:
                case ef.SendTask(task):
                    assert task.client in state.members
                    late = state.handover.at_work.get(task.client)
                    assert task == late or (not sealed and task.round_num == state.handover.round_num)
                case ef.Persist("closed", record=record):
                    assert record is not None
                    self.check_record(record, num_closed)
                    num_closed += 1
                case ef.Evaluate(_, version) | ef.Keep(version) | ef.AskOwnTest(_, version):
                    assert num_closed + 1 == version, "tests come in the order of the rounds"
                    assert version > self.version - MAX_COMMITTED, "the aggregators have deleted it"
        assert not (state.ended and (state.open or state.committed))
        assert len(state.committed) <= MAX_COMMITTED

    def check_record(self, record: RoundRecord, num_closed: int) -> None:
        names = [entry.client for entry in record.clients]
        assert num_closed == record.round, "rounds close in their order"
        assert record.round + 1 == record.version
        assert names == sorted(set(names))
        assert record.trouble or len(names) == record.num_updates
        assert record.latency_seconds >= record.collect_seconds >= 0
        assert record.trouble or record.num_late == sum(entry.staleness > 0 for entry in record.clients)
        assert all(0 <= entry.staleness <= self.max_staleness for entry in record.clients)
        assert record == RoundRecord.from_json(record.to_json())

    def carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.SendTask(task):
                self.tasks[task.client] = effect
            case ef.Open(round_num, participants):
                if round_num == self.version:
                    self.sealed.pop(round_num, None)  # a round that is not committed is open again
                self.participants = {(p.client, p.round_num) for p in participants}
                assert len(self.participants) == len(participants)
                assert all(0 <= round_num - n <= self.max_staleness for _, n in self.participants)
            case ef.Seal(round_num, attempt):
                held = tuple(self.uploads[client] for client in sorted(self.uploads))
                # Asked again, even after the commit, the aggregators give the same answer.
                answer = self.sealed.setdefault(round_num, ev.Sealed(round_num, held))
                self.answers.append(replace(answer, attempt=attempt))
            case ef.Commit(round_num, clients):
                self.commit(round_num, clients)
            case ef.Evaluate(client, version):
                self.evaluators.append((client, version))
            case ef.Keep(version, score):
                self.answers.append(ev.Kept(version, score))
            case ef.Persist("closed", record=record):
                assert record is not None
                self.closed.append(record)
            case ef.Wait():
                self.waits = effect

    def commit(self, round_num: int, clients: tuple[str, ...]) -> None:
        """Asked again, the aggregators give the same answer."""
        assert clients, "no model is made of nothing"
        if self.version == round_num:
            made = {(client, self.uploads[client].round_num) for client in clients}
            assert not made & self.counted, "no update counts twice"
            self.counted |= made
            self.version, self.uploads = round_num + 1, {}
        counts = dict.fromkeys((tensor.name for tensor in SPEC.tensors), len(clients))
        importance = dict.fromkeys(counts, 0.5)
        self.answers.append(ev.Committed(round_num, round_num + 1, importance, counts))

    def answer(self, keep: bool = False) -> None:
        """The oldest answer arrives; ``keep`` lets it arrive once more later."""
        if self.answers:
            event = self.answers.pop(0)
            self.apply(event)
            if keep:
                self.answers.append(event)

    def finish_task(self, client: str) -> None:
        """Upload if the aggregators still accept it, and report."""
        order = self.tasks.get(client)
        if order is None:
            return
        report = replace(report_of(client, order.task.round_num), train_seconds=self.train_seconds)
        open_round = self.state.open
        if open_round is not None and open_round.status == OPEN:
            accepts = (client, report.round_num) in self.participants and client not in self.uploads
            if accepts and (client, report.round_num) not in self.counted:
                self.uploads[client] = report
        self.apply(ev.Done(client, TaskResult(report, 100, 200, {"train": 1.0})))

    def claim(self, client: str, name: str, round_num: int) -> None:
        """A client says that a task is done which it has not done."""
        self.apply(ev.Done(client, TaskResult(report_of(name, round_num))))

    def evaluate(self, accuracy: float) -> None:
        if self.evaluators:
            client, version = self.evaluators.pop(0)
            if client in self.state.members and self.state.members[client].connected:
                self.apply(ev.Evaluated(version, accuracy, 1 - accuracy, 0.25, client=client))

    def restart(self) -> None:
        """The process dies and starts again from what is on disk."""
        self.state = from_json(RunState, self.disk, "disk")
        self.answers, self.evaluators, self.tasks = [], [], {}
        self.apply(ev.Restarted())

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.apply(ev.Tick())

    def behave(self) -> None:
        """Everyone is here, finishes its task and answers."""
        for client in CLIENTS:
            member = self.state.members.get(client)
            if member is None or member.has_left or not member.connected:
                self.apply(ev.Joined(member_of(client)))
            elif member.silent:
                self.apply(ev.Found(client))
            if member is not None and member.withheld:
                self.apply(ev.Withheld(client, False))
        for client in CLIENTS:
            self.finish_task(client)
        self.tick()
        self.answer_all()
        self.tick()
        self.evaluate(0.5)
        self.answer_all()

    def answer_all(self) -> None:
        while self.answers:
            self.answer()

    def run_to_the_end(self, max_steps: int = 400) -> None:
        """Everyone behaves from now on: the run must end."""
        for _ in range(max_steps):
            if self.state.ended:
                return
            if self.state.phase in ("paused", "held"):
                self.apply(ev.Controlled("resume"))
            self.behave()
            until = self.waits.until
            self.tick(max(0.0, until - self.now) if until is not None else 0.0)
        raise AssertionError(f"the run did not end: {self.state.phase}, {self.waits}")
