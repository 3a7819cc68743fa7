"""A run on the virtual clock: drives the round engine with the arrivals of simulated clients."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from fedel.core.compression import restored
from fedel.core.staleness import caught_up
from fedel.core.timing import STEP_SCOPES
from fedel.errors import ConfigError, UpdateRefused
from fedel.records import ClientRecord, RoundRecord
from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.aggregator import Closed, RoundFold, checked
from fedel.roles.coordinator import RoundEngine
from fedel.roles.run_state import OPEN, Member, RunState, TaskResult
from fedel.simulation import clock
from fedel.simulation.conditions import Faults
from fedel.simulation.devices import Client
from fedel.simulation.executors import Executor, outcomes
from fedel.simulation.job import Evaluation
from fedel.simulation.scores import scores
from fedel.simulation.store import Checkpoint
from fedel.simulation.workers import ClientTask, Outcome, OwnTest
from fedel.strategies import secure_fold
from fedel.strategies.protection import RoundStart, repeatable_secret
from fedel.strategies.server_steps import averages
from fedel.types import Array, Change, Memory, Participant, Patch, Report, SentUpdate, Tensors, Update

Progress = Callable[[int, int], None]
"""Called with the number of clients of a round that are done, and the number of all."""


@dataclass(order=True)
class Arrival:
    """A client comes back: at a time on the round's clock, which starts at 0 with each round."""

    seconds: float
    client: str
    report: Report = field(compare=False)
    memory: Memory = field(compare=False)
    """What the client remembers if its update counts."""
    spent: clock.Spent = field(compare=False)
    phases: Mapping[str, float] = field(compare=False)
    bytes_up: int = field(compare=False)
    bytes_down: int = field(compare=False)
    update: Update | None = field(compare=False)
    """``None`` once it is folded."""
    refused: str = field(default="", compare=False)
    """Why the update cannot be folded."""


@dataclass(frozen=True)
class _Received:
    num_bytes: int
    held: Array
    """The versions that the client holds then, as in ``Checkpoint.held``."""


@dataclass
class _VirtualRound:
    """One round as the simulated aggregator and network see it."""

    fold: RoundFold
    arrived: dict[str, Arrival] = field(default_factory=dict)
    received: dict[str, _Received] = field(default_factory=dict)
    """What came down to each client; nothing to one that dropped out."""
    dropped: list[str] = field(default_factory=list)
    closed: Closed | None = None
    record: RoundRecord | None = None


class Simulation:
    """Plays the rounds of one run; ``checkpoint`` is its state between two rounds."""

    def __init__(
        self,
        engine: RoundEngine,
        clients: Sequence[Client],
        executor: Executor,
        checkpoint: Checkpoint,
        *,
        faults: Faults | None = None,
        evaluation: Evaluation | None = None,
        num_test_samples: int = 0,
        num_together: int = 1,
    ) -> None:
        self._engine = engine
        self._clients = {client.name: client for client in clients}
        self._executor = executor
        self._faults = faults or Faults()
        self._evaluation = evaluation or Evaluation()
        self._num_test_samples = num_test_samples
        self._num_together = num_together
        # In forward order, whatever the order in a file.
        model = {tensor.name: checkpoint.model[tensor.name] for tensor in engine.spec.tensors}
        self.checkpoint = replace(checkpoint, model=model)
        # Work that was under way when a simulation ended is begun again.
        handover = replace(checkpoint.handover, at_work={})
        if engine.planner.scope == "round" and not handover.speeds:
            handover = replace(handover, speeds={client.name: client.link.speed for client in clients})
        self._state = RunState(
            handover=handover,
            members={client.name: _member(client) for client in clients},
            untrained_rounds=checkpoint.untrained_rounds,
        )
        self._arrivals: list[Arrival] = []
        self._models: dict[int, Tensors] = {}
        """Versions that clients started from whose updates may still come."""
        self._participants: dict[tuple[str, int], Participant] = {}
        self._deadline: float | None = None
        self._now = 0.0
        executor.publish(model)

    @property
    def is_over(self) -> bool:
        return self._engine.planner.is_over(self.checkpoint.handover)

    def play(self, progress: Progress | None = None) -> RoundRecord:
        """One round, and its record."""
        begin = time.perf_counter()
        self._round = _VirtualRound(self._empty_fold())
        self._progress = progress
        self._apply(ev.Tick(), 0.0)
        if self._state.open is None:
            raise ConfigError(
                f"rounds.min_clients = {self._engine.run.rounds.min_clients}, but the fleet has only"
                f" {len(self._clients)} clients: no round can start"
            )
        while self._round.record is None:
            self._wait()
        return replace(self._round.record, wall_seconds=time.perf_counter() - begin)

    def _wait(self) -> None:
        """For the next client or the deadline, whichever comes first."""
        deadline, open_round = self._deadline, self._state.open
        if open_round is None or open_round.status != OPEN:
            return self._apply(ev.Settle(), self._now)
        assert deadline is not None
        # Once the deadline has passed with too few updates, the round waits for the next client.
        overdue = open_round.overdue
        if self._arrivals and (overdue or clock.in_time(self._arrivals[0].seconds, deadline)):
            arrival = heapq.heappop(self._arrivals)
            self._apply(self._arrive(arrival), arrival.seconds)
            self._apply(ev.CloseNow() if self._all_lost() else ev.Settle(), arrival.seconds)
        elif overdue:
            self._apply(ev.CloseNow(), self._now)
        else:
            self._apply(ev.Tick(), max(self._now, deadline))
        return None

    def _all_lost(self) -> bool:
        """Whether every client has failed: virtual ones would do so again."""
        return self._state.open is not None and self._state.open.lost.keys() == self._clients.keys()

    def _apply(self, event: ev.Event, now: float) -> None:
        """Apply an event and all that follows from it at once."""
        events: list[ev.Event] = [event]
        self._now = now
        while events:
            self._state, effects = self._engine.apply(self._state, events.pop(0), now)
            self._open([effect for effect in effects if isinstance(effect, ef.Open)])
            self._train([effect for effect in effects if isinstance(effect, ef.SendTask)])
            events += self._test_own([effect for effect in effects if isinstance(effect, ef.AskOwnTest)])
            for effect in effects:
                events += self._carry_out(effect)

    def _carry_out(self, effect: ef.Effect) -> list[ev.Event]:
        """Carry an effect out; the events are the answers."""
        match effect:
            case ef.Seal(round_num, attempt):
                return [ev.Sealed(round_num, self._held_reports(), attempt, final=True)]
            case ef.Commit(round_num):
                gone = [ev.Failed(client, round_num, "it dropped out") for client in self._round.dropped]
                return [self._commit(round_num), *gone]
            case ef.Evaluate(_, version):
                return [self._test(version)]
            case ef.Keep(version, score):
                return [ev.Kept(version, score)]
            case ef.Close(record):
                self._round.record = self._close(record)
            case ef.Wait(until):
                self._deadline = until
            case _:
                pass  # clients and files learn what they need from the checkpoint
        return []

    def _open(self, rounds: Sequence[ef.Open]) -> None:
        for effect in rounds:
            self._participants = {(each.client, each.round_num): each for each in effect.participants}

    # Clients

    def _train(self, orders: Sequence[ef.SendTask]) -> None:
        names = [order.task.client for order in orders]
        round_, seed, start = self._round, self._engine.run.seed, self._now
        # A client that got a new task gives up the one it was late with.
        self._arrivals = [arrival for arrival in self._arrivals if arrival.client not in names]
        heapq.heapify(self._arrivals)
        round_.fold.invite(names)
        dropped = [
            order.task.client
            for order in orders
            if self._faults.drops_out(seed, order.task.round_num, order.task.client)
        ]
        round_.dropped += dropped
        tasks = [
            ClientTask(
                o.task,
                o.accepted_round,
                self.checkpoint.memories.get(o.task.client, Memory()),
                self._faults.drift(seed, o.task.round_num, o.task.client),
            )
            for o in orders
            if o.task.client not in dropped
        ]
        # Devices of one type are often at the same window: these can train side by side.
        kind = lambda each: (self._clients[each.task.client].device, str(each.memory.window))  # noqa: E731
        for num_done, outcome in enumerate(outcomes(self._executor, tasks, self._num_together, kind), start=1):
            heapq.heappush(self._arrivals, self._arrival(outcome, start))
            if self._progress:
                self._progress(num_done, len(tasks))

    def _arrival(self, outcome: Outcome, start: float) -> Arrival:
        report, round_ = outcome.update.report, self._round
        client, scope = self._clients[report.client], self._engine.planner.scope
        bytes_up = self._bytes_up(outcome.update)
        received = round_.received[client.name] = self._receive(client.name, outcome.needed)
        bytes_down = received.num_bytes
        drift = self._faults.drift(self._engine.run.seed, report.round_num, client.name)
        up, down = client.link.up_seconds(bytes_up), client.link.down_seconds(bytes_down)
        as_profiled = self._as_profiled(report)
        spent = clock.spent(as_profiled, drift, up + down)
        # Seconds and memory of the machine that simulates say nothing about the device.
        report = replace(
            report,
            train_seconds=spent.training(scope),
            probe_seconds=drift * as_profiled.probe.total(scope),
            step_seconds=drift * as_profiled.cost.total(scope),
            peak_memory_bytes=0,
        )
        phases = {"download": down, "train": spent.train_seconds, "upload": up} if scope == "round" else {}
        update = replace(self._restored(outcome.update), report=report)
        seconds = start + spent.total(scope)
        arrival = Arrival(
            seconds, client.name, report, outcome.memory, spent, phases, bytes_up, bytes_down, update
        )
        if self._faults.fails(self._engine.run.seed, report.round_num, client.name):
            arrival.update, arrival.refused = None, "its task failed"
            round_.fold.drop(update)
        elif self._counts_for_sure(report, seconds):
            self._fold(arrival)  # at once, so that memory does not grow with the number of clients
        return arrival

    def _as_profiled(self, report: Report) -> Report:
        """With the seconds of the device's profile, not those that earlier rounds made the client expect."""
        assert self._state.open is not None
        speed = self._state.open.tasks[report.client].speed
        if speed.slowness == 1 == speed.probe_slowness:
            return report
        cost = report.cost.scaled(1 / speed.slowness)
        return replace(report, cost=cost, probe=report.probe.scaled(1 / speed.probe_slowness))

    def _restored(self, sent: SentUpdate) -> Update:
        """Against the model of this round, from which the client started."""
        return restored(self._engine.run.upload, sent, self.checkpoint.model)

    def _counts_for_sure(self, report: Report, seconds: float) -> bool:
        open_round = self._state.open
        assert open_round is not None
        waits_for = [task.client for task in open_round.plan.tasks if task.num_rounds == 1]
        waits_for_all = not self._engine.planner.enough(len(waits_for) - 1, len(waits_for))
        is_expected = waits_for_all and report.client in waits_for
        return is_expected and clock.in_time(seconds, open_round.deadline)

    def _bytes_up(self, update: SentUpdate) -> int:
        if self._engine.run.protection.secure:
            assert self._state.open is not None
            return secure_fold.bytes_up(self._restored(update).patches, len(self._state.open.tasks))
        return sum(patch_bytes(patch) for patch in update.patches.values())

    def _receive(self, name: str, needed: Collection[str]) -> _Received:
        """A client downloads the tensors that it needs, if they changed since it last had them."""
        tensors, checkpoint = self._engine.spec.tensors, self.checkpoint
        versions = np.array([checkpoint.versions.get(t.name, 0) for t in tensors])
        sizes = np.array([t.num_bytes for t in tensors])
        wanted = np.array([t.name in needed for t in tensors])
        held = checkpoint.held.get(name, -1)
        num_bytes = int(sizes[wanted & (versions > held)].sum())
        return _Received(num_bytes, np.where(wanted, checkpoint.handover.round_num, held).astype(np.int32))

    # The aggregator

    def _empty_fold(self) -> RoundFold:
        run, checkpoint = self._engine.run, self.checkpoint
        start = RoundStart(checkpoint.model, checkpoint.handover.round_num, secret=repeatable_secret(run.seed))
        strategy, spec = self._engine.planner.strategy, self._engine.spec
        return RoundFold(strategy, spec, run.protection, start, run.server)

    def _arrive(self, arrival: Arrival) -> ev.Event:
        self._fold(arrival)
        self._round.arrived[arrival.client] = arrival
        report = arrival.report
        if arrival.refused:
            return ev.Failed(arrival.client, report.round_num, arrival.refused)
        result = TaskResult(report, arrival.bytes_up, arrival.bytes_down, arrival.phases)
        return ev.Done(arrival.client, result)

    def _fold(self, arrival: Arrival) -> None:
        if arrival.update is not None:
            report = arrival.report
            participant = self._participants[report.client, report.round_num]
            try:
                arrival.report = checked(report, self._engine.spec, participant)
                self._round.fold.add(self._caught_up(replace(arrival.update, report=arrival.report)))
            except UpdateRefused as error:
                arrival.refused = str(error)
            arrival.update = None

    def _caught_up(self, update: Update) -> Update:
        """The update as the fold of the open round takes it."""
        started, present = update.report.round_num, self.checkpoint.handover.round_num
        if started == present:
            return update
        weight = self._engine.run.rounds.staleness.weight(present - started)
        return caught_up(update, self._engine.spec, weight, self._models[started], self.checkpoint.model)

    def _held_reports(self) -> tuple[Report, ...]:
        """In the order of the plan, so that sums over them do not depend on who came first; late ones last."""
        open_round = self._state.open
        assert open_round is not None
        held = {name: a.report for name, a in self._round.arrived.items() if not a.refused}
        planned = [task.client for task in open_round.plan.tasks]
        return tuple(held[name] for name in [*planned, *sorted(held.keys() - set(planned))] if name in held)

    def _commit(self, round_num: int) -> ev.Committed:
        before = self.checkpoint
        closed = self._round.closed = self._round.fold.finish(before.model, before.fold_state)
        self._executor.publish(self._changed(closed))
        return ev.Committed(round_num, round_num + 1, closed.global_importance, closed.num_clients)

    def _changed(self, closed: Closed) -> dict[str, np.ndarray]:
        return {name: new for name, new in closed.model.items() if new is not self.checkpoint.model[name]}

    def _close(self, record: RoundRecord) -> RoundRecord:
        """Make the next checkpoint, and add to the record what only a simulation knows."""
        before, round_, closed = self.checkpoint, self._round, self._round.closed
        assert closed is not None
        handover = self._state.handover
        memories = {entry.client: round_.arrived[entry.client].memory for entry in record.clients}
        self.checkpoint = Checkpoint(
            closed.model,
            handover,
            closed.state,
            {**before.memories, **memories},
            {**before.versions, **dict.fromkeys(self._changed(closed), handover.round_num)},
            {**before.held, **{name: received.held for name, received in round_.received.items()}},
            record.tensor_untrained_rounds,
        )
        scope, late = self._engine.planner.scope, sorted(self._arrivals)
        self._keep_late(late, before.model, record.latency_seconds)
        in_time = [a for a in round_.arrived.values() if a.report.round_num == record.round]
        clocks = {s: max((a.spent.total(s) for a in in_time), default=0.0) for s in STEP_SCOPES}
        return replace(
            record,
            clients=tuple(self._client(entry, round_.arrived[entry.client]) for entry in record.clients),
            clock_seconds=clocks | {scope: record.latency_seconds},
            phases={},
            dropped=tuple(round_.dropped),
            late=tuple(arrival.client for arrival in late),
            bytes_up=sum(arrival.bytes_up for arrival in round_.arrived.values()),
            bytes_down=sum(received.num_bytes for received in round_.received.values()),
        )

    def _keep_late(self, late: Sequence[Arrival], model: Tensors, round_seconds: float) -> None:
        """Late updates that would still count are on their way when the next round starts."""
        at_work = self._state.handover.at_work
        waiting = [arrival for arrival in late if arrival.client in at_work]
        self._arrivals = [replace(arrival, seconds=arrival.seconds - round_seconds) for arrival in waiting]
        self._models[self._state.handover.round_num - 1] = model
        needed = {task.round_num for task in at_work.values()}
        self._models = {number: each for number, each in self._models.items() if number in needed}

    def _client(self, entry: ClientRecord, arrival: Arrival) -> ClientRecord:
        spent = arrival.spent
        clocks = {scope: spent.training(scope) for scope in STEP_SCOPES}
        return replace(
            entry, phases=arrival.phases, clock_seconds=clocks, network_seconds=spent.network_seconds
        )

    # Tests

    def _test(self, version: int) -> ev.Evaluated:
        """Accuracy and loss of the new model, or of its average; in some rounds also of each exit."""
        test = partial(scores, self._executor, self._num_test_samples, self._evaluation.limit)
        every, is_last = self._evaluation.exits_every, self._engine.planner.is_over(self._state.handover)
        exits = None
        with self._published():
            (score,) = test(self._exits_tested)
            if every and (version % every == 0 or is_last):
                exits = tuple(each.accuracy for each in test(each_exit=True))
        return ev.Evaluated(version, score.accuracy, score.loss, exit_accuracies=exits)

    def _test_own(self, asked: Sequence[ef.AskOwnTest]) -> list[ev.Event]:
        """On the samples that each client holds out."""
        if not asked:
            return []
        with self._published():
            tests = [OwnTest(each.client, self._exits_tested) for each in asked]
            found: dict[int, tuple[float, float]] = dict(self._executor.run(tests))
        return [
            ev.OwnTested(e.client, e.version, *found[place], self._clients[e.client].num_held_out)
            for place, e in enumerate(asked)
        ]

    @property
    def _exits_tested(self) -> tuple[int, ...]:
        return self._engine.planner.strategy.exits_to_average(self._engine.spec)

    @contextmanager
    def _published(self) -> Iterator[None]:
        """Inside, workers have the model that is tested: the new one, or its average."""
        closed = self._round.closed
        assert closed is not None
        averaged = averages(closed.state)
        self._executor.publish(averaged)
        yield
        self._executor.publish({name: closed.model[name] for name in averaged})


def patch_bytes(patch: Patch | Change) -> int:
    """Bytes on the wire: the values or their compressed change, and one bit per place where a mask says which
    they are.

    >>> three = np.zeros(3, np.float32)
    >>> patch_bytes(Patch(three)), patch_bytes(Patch(three, np.ones(9, bool)))
    (12, 14)
    """
    mask = -(-patch.where.size // 8) if isinstance(patch.where, np.ndarray) else 0
    return (patch.values.nbytes if isinstance(patch, Patch) else patch.data.nbytes) + mask


def _member(client: Client) -> Member:
    held_out = client.num_held_out
    about = client.name, client.num_samples, client.profile, client.device
    return Member(*about, num_held_out=held_out, connected=True)
