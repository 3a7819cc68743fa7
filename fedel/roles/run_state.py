"""The state of a run: everything the round engine knows. All of it is JSON (``fedel.serialisation``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedel.client_tests import OwnScore
from fedel.records import DeviceUsage, RoundRecord
from fedel.roles.planner import Handover
from fedel.roles.secure_round import SecureRound
from fedel.types import ClientView, Plan, Report, Task, TimingProfile

QUEUED, WAITING, RUNNING, PAUSED, STOPPING, HELD = "queued", "waiting", "running", "paused", "stopping", "held"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
ENDED = (FINISHED, STOPPED, FAILED)
"""Phases of a run; the last three are final. One that is queued waits for its turn (``run_queue.py``), one that
waits, for clients. A run that a person paused still closes its open round; one that is held waits where
something went wrong, until a person resumes it. Both are shown as paused."""
TRIES_AGAIN = "`fedel runs resume` tries again from here"
"""How the message of a run that is held ends."""
STOPS = "; it ends after the open round, or at once with `fedel runs stop --now`"
"""How the message of a run that stops ends."""

OPEN, SEALED, COMMITTED, CLOSED = "open", "sealed", "committed", "closed"
"""A round goes through these in order: tasks are out; no update is accepted any more; the next model is made;
its record is complete, with the test of the model if one is due. The next round opens once the model is made:
the test goes on beside it."""
MAX_COMMITTED = 2
"""Rounds that may be committed and not closed: the model of one is tested, the next waits. Aggregators keep as
many of the newest versions, so that a version that turns out to be the best is still there."""


@dataclass(frozen=True)
class Member:
    """A client that joined the run."""

    client: str
    num_samples: int
    profile: TimingProfile
    device_type: str = ""
    can_evaluate: bool = False
    """It holds test data."""
    num_held_out: int = 0
    """Samples of its own that it tests models on and does not train on."""
    has_left: bool = False
    """It said goodbye, and gets no tasks until it joins again."""
    connected: bool = False
    """A message sent now would reach it."""
    silent: bool = False
    """It was not heard for too long, and gets no new task until it is heard again."""
    withheld: bool = False
    """An operator keeps it from the next rounds: it is cordoned, or the job's ``clients`` leave it out."""

    @property
    def present(self) -> bool:
        """Whether the next round may count on it."""
        return not self.has_left and not self.silent and not self.withheld

    @property
    def view(self) -> ClientView:
        return ClientView(self.client, self.num_samples, self.profile)


class Members(dict[str, Member]):
    """By name. Never changed in place, so that what follows from all of them is found once and not for every
    message of every client."""

    @cached_property
    def in_order(self) -> tuple[Member, ...]:
        return tuple(self[name] for name in sorted(self))

    @cached_property
    def present(self) -> tuple[Member, ...]:
        return tuple(member for member in self.in_order if member.present)


@dataclass(frozen=True)
class TaskResult:
    """What a client sends when its task is done."""

    report: Report
    bytes_up: int = 0
    bytes_down: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    device: DeviceUsage = field(default_factory=DeviceUsage)


@dataclass(frozen=True)
class Evaluation:
    """The test of the oldest model that waits for one."""

    deadline: float
    evaluator: str = ""
    """The client that has the task; "" if none has."""
    unfit: frozenset[str] = frozenset()
    """Clients that tried and failed."""
    answered: bool = False
    """The score is there: the best so far, which the aggregators are asked to keep."""
    over: bool = False
    """Nothing more is to come of it; clients may still test on their own data."""
    is_best: bool = False
    """It is over, and the aggregators keep the model as the best."""


@dataclass(frozen=True)
class OwnTests:
    """The tests of that model on clients' own data."""

    deadline: float
    waiting: frozenset[str]
    """Clients that have not answered."""
    asked: frozenset[str] = frozenset()
    """Of these, those that have the task."""
    scores: Mapping[str, OwnScore] = field(default_factory=dict)
    num_missing: int = 0
    """Clients that will not answer."""


@dataclass(frozen=True)
class OpenRound:
    """The round in progress, until its model is made."""

    round_num: int
    plan: Plan
    opened_at: float
    deadline: float
    status: str = OPEN
    repeats: int = 0
    """How often the deadline passed with too few reports."""
    seals: int = 0
    """How often the round was sealed with too few updates, and opened again."""
    done: frozenset[str] = frozenset()
    lost: Mapping[str, str] = field(default_factory=dict)
    """Clients that will not deliver, and why."""
    results: Mapping[str, TaskResult] = field(default_factory=dict)
    sealed_at: float = 0.0
    reports: tuple[Report, ...] = ()
    """Of the clients whose update every aggregator holds; known once the round is sealed."""
    secure: SecureRound | None = None
    """With secure aggregation."""

    @property
    def overdue(self) -> bool:
        """A deadline has passed: the round closes as soon as there are enough reports."""
        return self.repeats > 0

    @property
    def tasks(self) -> Mapping[str, Task]:
        return self.plan.by_client


@dataclass(frozen=True)
class RunState:
    phase: str = WAITING
    message: str = ""
    """Why the run is in its phase, for people."""
    handover: Handover = field(default_factory=Handover)
    members: Mapping[str, Member] = field(default_factory=dict)
    open: OpenRound | None = None
    unready: Mapping[str, str] = field(default_factory=dict)
    """Clients that could not join, and why, for people; at most ``MAX_UNREADY`` (``missing.py``)."""
    committed: tuple[RoundRecord, ...] = ()
    """Of the rounds that are not closed although their model is made; complete but for the test."""
    evaluation: Evaluation | None = None
    """Of the first of these."""
    own_tests: OwnTests | None = None
    """Of the same."""
    late_results: Mapping[str, TaskResult] = field(default_factory=dict)
    """What came of tasks in ``handover.at_work``."""
    untrained_rounds: Mapping[str, int] = field(default_factory=dict)
    """Rounds since each tensor was last trained."""
    missed_tests: Mapping[str, int] = field(default_factory=dict)
    """How often each client was given a test of a model and did not answer in time."""
    best_accuracy: float | None = None
    best_version: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.members, Members):
            object.__setattr__(self, "members", Members(self.members))

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def in_order(self) -> Sequence[Member]:
        """All members by name: plans need a fixed order."""
        assert isinstance(self.members, Members)
        return self.members.in_order

    @property
    def present(self) -> Sequence[Member]:
        assert isinstance(self.members, Members)
        return self.members.present

    @property
    def working(self) -> frozenset[str]:
        """Clients from whom something is still awaited: an update, with secure aggregation a reveal, a test."""
        open_round, evaluation = self.open, self.evaluation
        found = set(self.handover.at_work) - self.late_results.keys()
        if open_round is not None and (open_round.status == OPEN or open_round.secure is not None):
            back = frozenset() if open_round.secure is not None else open_round.done
            found |= open_round.tasks.keys() - open_round.lost.keys() - back
        if evaluation is not None and evaluation.evaluator and not evaluation.answered:
            found.add(evaluation.evaluator)
        return frozenset(found)

    def with_member(self, member: Member) -> RunState:
        return replace(self, members={**self.members, member.client: member})
