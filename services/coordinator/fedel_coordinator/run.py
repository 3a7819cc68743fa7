"""Drives the round engine of one run: applies events one at a time, and carries the effects out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedel.errors import FedelError, ServiceError
from fedel.job import RunConfig
from fedel.records import RoundRecord, RunResult, run_result
from fedel.roles import events as ev
from fedel.roles.coordinator import RoundEngine
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_state import FAILED, STOPPING, RunState
from fedel.serialisation import from_json
from fedel.telemetry import CoordinatorMetrics
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.retry import Backoff, retrying
from fedel_coordinator import messages, persistence
from fedel_coordinator.activity import Activity
from fedel_coordinator.change_signal import ChangeSignal, wait_for_event
from fedel_coordinator.errors import RunEnded
from fedel_coordinator.run_directory import RunDirectory
from fedel_coordinator.sessions import Device, Session, Sessions
from fedel_coordinator.shards import OutageHandler, Shards, StoppedWaiting
from fedel_coordinator.store import RunRow, Store, StoreUnavailable

log = logging.getLogger(__name__)
WAITS = "waits"
"""Name of background tasks that wait for others; they may be cancelled."""
HEAVY = (ev.Tick, ev.Committed)
"""Events that may plan a round or make a record: decided in a thread, because other runs must not wait."""


def steady_clock() -> Callable[[], float]:
    """Unix seconds that never jump: deadlines must not move when somebody sets the machine's clock."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


@dataclass(frozen=True)
class RunServices:
    """What the runs of one coordinator share."""

    store: Store
    sessions: Sessions
    shards: Shards
    metrics: CoordinatorMetrics
    clock: Callable[[], float]
    """Unix seconds."""
    runs_dir: Path | None = None

    def directory(self, run: str) -> RunDirectory | None:
        return RunDirectory(self.runs_dir / run) if self.runs_dir else None


class CoordinatorRun:
    """One run of this process. ``state`` changes only in ``_apply``, under the lock."""

    def __init__(self, row: RunRow, services: RunServices, stored: persistence.LoadedRun) -> None:
        self.row = row
        self.name = row.name
        self.services = services
        self.config = RunConfig.parse(from_config(row), f"run '{row.name}'")
        self.spec = persistence.spec_from_json(row.spec_json)
        self.engine = RoundEngine(RoundPlanner(self.config, self.spec))
        self.state: RunState = stored.state
        self.last_record: RoundRecord | None = stored.last_record
        self.activities = {client: Activity() for client in self.state.members}
        self.change = ChangeSignal()
        self._notices = dict.fromkeys(("database", "aggregators", "engine"), "")
        """What the run waits for at the moment, for people, by source; the first that is not empty is shown."""
        self.directory = services.directory(row.name)
        self.devices: dict[str, Device] = dict(stored.devices)
        self._lock = asyncio.Lock()
        self._calls = asyncio.Lock()
        self._woken = asyncio.Event()
        self._wake_at: float | None = None
        self._background: set[asyncio.Task[None]] = set()
        """Events being applied and calls to aggregators; they outlive the session or call that caused them."""

    @staticmethod
    async def load(row: RunRow, services: RunServices) -> CoordinatorRun:
        """The run as the store knows it."""
        late_counts = RunConfig.parse(from_config(row), f"run '{row.name}'").rounds.late == "next"
        stored = await asyncio.to_thread(persistence.load, services.store, row, late_counts=late_counts)
        return CoordinatorRun(row, services, stored)

    @property
    def notice(self) -> str:
        return next((notice for notice in self._notices.values() if notice), "")

    @property
    def ended(self) -> bool:
        return self.state.ended

    @property
    def log_fields(self) -> dict[str, Any]:
        return {"run": self.name, "round": self.state.handover.round_num}

    # Driving

    async def drive(self) -> None:
        """Take the run from where it is to its end."""
        await self._surely(ev.Restarted())
        while not self.ended:
            self._woken.clear()
            await self._report_silence()
            await self._surely(ev.Tick())
            if not self.ended:
                wake_at = self._wake_at
                timeout = None if wake_at is None else max(0.0, wake_at - self.services.clock())
                await wait_for_event(self._woken, timeout)

    def wake(self) -> None:
        """Look again: the state changed, or a client is heard again."""
        self._woken.set()

    async def _report_silence(self) -> None:
        present = self.services.sessions.present
        for member in list(self.state.members.values()):
            if member.silent == present(member.client):
                event = ev.Found(member.client) if member.silent else ev.Lost(member.client)
                await self._surely(event)

    async def stop(self) -> None:
        """Finish what is being written. What waits for others is cut off and done again after a restart."""
        for task in self._background:
            if task.get_name() == WAITS:
                task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # Events

    async def apply(self, event: ev.Event) -> None:
        """Apply an event to its end, even if the caller is cancelled. ``StoreUnavailable``: nothing changed."""
        await asyncio.shield(self._start(self._apply(event), "event"))

    def post(self, event: ev.Event) -> None:
        """Apply an event later, in order."""
        self._start(self._surely(event), WAITS)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _surely(self, event: ev.Event) -> None:
        """Apply an event of our own; repeated while the database does not answer."""

        def on_failure(error: Exception, failures: int) -> None:
            if failures == 1:
                log.warning("%s; trying again", error, extra=self.log_fields)
            self._show("database", "the database does not answer; trying again until it does")

        try:
            await retrying(
                lambda: self.apply(event),
                retried=lambda error: isinstance(error, StoreUnavailable),
                on_failure=on_failure,
                backoff=Backoff(5.0),
            )
        except FedelError as error:
            await self._surely(ev.Broken(str(error)))
        except Exception as error:
            log.exception("round failed", extra=self.log_fields)
            reason = f"round {self.state.handover.round_num}: {type(error).__name__}: {error}; see the log"
            await self._surely(ev.Broken(reason))

    async def _apply(self, event: ev.Event) -> None:
        async with self._lock:
            before, now = self.state, self.services.clock()
            if isinstance(event, HEAVY):
                state, effects = await asyncio.to_thread(self.engine.apply, before, event, now)
            else:
                state, effects = self.engine.apply(before, event, now)
            for effect in effects:
                if isinstance(effect, ev.Persist):
                    device = self.devices.get(effect.client, Device())
                    save = (self.services.store, self.name, effect, state, device, now)
                    await asyncio.to_thread(persistence.save, *save)
            self.state = state
            self._show("database", "")
            if before.open is None and state.open is not None:
                for activity in self.activities.values():
                    activity.phase = "idle"
            for effect in effects:
                await self._carry_out(effect)
        if state is not before:
            self.wake()
            self.change.notify()

    async def control(self, action: str) -> None:
        """Pause, resume or stop; stopping what has ended already is not an error."""
        if self.ended and action != "stop":
            raise RunEnded(f"run '{self.name}' is {self.state.phase}: create a new run to continue training")
        try:
            await self.apply(ev.Controlled(action))
        except ServiceError as error:
            raise RunEnded(f"run '{self.name}': {error}") from None

    async def receive(self, session: Session, message: messages.Message) -> None:
        """A message of an agent about this run."""
        client, fields = session.client, self.log_fields | {"client": session.client}
        if isinstance(message, pb.Join):
            return await self._join(session, message)
        if isinstance(message, pb.TaskProgress):
            if self.state.open is not None and message.round_num == self.state.open.round_num:
                self._activity(client).progressed(message)
                self.change.notify()
            return None
        if isinstance(message, pb.TaskFailed):
            self.services.metrics.tasks_failed.labels(self.name).inc()
            log.warning("%s failed: %s", client, message.message, extra=fields)
        event = messages.event_of(client, session.device, message)
        assert event is not None
        await self.apply(event)
        if isinstance(event, ev.Done):
            task = self.state.open.tasks.get(client) if self.state.open else None
            self._activity(client).done(event.result, task)
            self.change.notify()
        return None

    async def _join(self, session: Session, join: pb.Join) -> None:
        client, fields = session.client, self.log_fields | {"client": session.client}
        if self.ended:
            return session.push(messages.ended_message(self.name, self.state.phase))
        if reason := messages.objection(join, self.spec):
            self.services.metrics.refused.labels("join").inc()
            log.warning("refused %s: %s", client, reason, extra=fields)
            return session.push(messages.refusal_message(self.name, reason))
        self.devices[client] = session.device
        session.joined.add(self.name)
        event = messages.event_of(client, session.device, join)
        assert event is not None
        try:
            await self.apply(event)
        except StoreUnavailable:
            session.joined.discard(self.name)
            raise
        self._activity(client)
        log.info("%s joined", client, extra=fields)
        return None

    async def left(self, client: str) -> None:
        log.info("%s left", client, extra=self.log_fields | {"client": client})
        await self.apply(ev.Left(client))
        self._activity(client).phase = "idle"

    def _activity(self, client: str) -> Activity:
        return self.activities.setdefault(client, Activity())

    # Effects

    async def _carry_out(self, effect: ev.Effect) -> None:
        push = self.services.sessions.push
        match effect:
            case ev.SendTask():
                push(effect.task.client, self.name, messages.task_message(self.name, self.spec, effect))
            case ev.SendClosed(client):
                push(client, self.name, messages.closed_message(self.name, effect))
            case ev.Ignore(client, reason):
                self.services.metrics.refused.labels("done").inc()
                log.warning("ignored %s", reason, extra=self.log_fields | {"client": client})
            case ev.Evaluate(client):
                push(client, self.name, messages.evaluation_message(self.name, effect))
            case ev.Open():
                self._start(self._call(self._open(effect)), WAITS)
            case ev.Seal(round_num):
                self._start(self._call(self._seal(round_num)), WAITS)
            case ev.Commit(round_num, clients):
                self._start(self._call(self._commit(round_num, clients)), WAITS)
            case ev.Keep():
                self._start(self._call(self._keep(effect)), WAITS)
            case ev.Close(record):
                await self._close(record)
            case ev.End(phase, message):
                await self._end(phase, message)
            case ev.Wait(until, why):
                self._wake_at = until
                if why and self.state.open is not None and why != self._notices["engine"]:
                    log.warning("round %d: %s", self.state.open.round_num, why, extra=self.log_fields)
                self._show("engine", why)
            case ev.Persist():
                pass  # done before everything else

    async def _call(self, work: Coroutine[Any, Any, ev.Event | None]) -> None:
        """A call to the aggregators, whose answer is an event. Calls leave in the order of their effects."""
        try:
            async with self._calls:
                event = await work
        except StoppedWaiting:
            event = ev.Interrupted()
        except ServiceError as error:
            event = ev.Broken(str(error))
        if event is not None:
            await self._surely(event)

    async def _open(self, effect: ev.Open) -> None:
        await self.services.shards.open(self.name, effect.round_num, effect.participants, self._outages())

    async def _seal(self, round_num: int) -> ev.Event:
        reports = await self.services.shards.seal(self.name, round_num, self._outages())
        return ev.Sealed(round_num, tuple(reports))

    async def _commit(self, round_num: int, clients: tuple[str, ...]) -> ev.Event:
        return await self.services.shards.commit(self.name, round_num, clients, self._outages())

    async def _keep(self, effect: ev.Keep) -> ev.Event:
        await self.services.shards.keep(self.name, effect.version, "best", self._outages())
        return ev.Kept(effect.version, effect.score)

    def _outages(self) -> OutageHandler:
        def show(notice: str) -> None:
            if notice and notice != self._notices["aggregators"]:
                log.warning("%s", notice, extra=self.log_fields)
            self._show("aggregators", notice)

        return OutageHandler(show, lambda: self.state.phase == STOPPING)

    def _show(self, source: str, notice: str) -> None:
        if notice != self._notices[source]:
            self._notices[source] = notice
            self.change.notify()

    async def _close(self, record: RoundRecord) -> None:
        self.last_record = record
        metrics = self.services.metrics
        metrics.observe_round(self.name, record, self.spec.num_bytes)
        if record.accuracy is not None and record.test_loss is not None:
            metrics.observe_evaluation(self.name, record.accuracy, record.test_loss)
        await self.write(lambda directory: directory.append(record.to_json()))
        log.info("%s", _line(record), extra={"run": self.name, "round": record.round})

    async def _end(self, phase: str, message: str) -> None:
        """Write the result, and send the end to every client."""
        level = logging.ERROR if phase == FAILED else logging.INFO
        log.log(level, "run '%s' %s. %s", self.name, phase, message, extra=self.log_fields)
        self._notices = dict.fromkeys(self._notices, "")
        for client in self.state.members:
            self.services.sessions.push(client, self.name, messages.ended_message(self.name, phase))
        await self.write_result()

    async def write_result(self) -> None:
        await self.write(lambda directory: directory.finish(self._result()))

    async def write(self, how: Callable[[RunDirectory], None]) -> None:
        """To the run's directory, if it has one. Trouble there stops nothing: the store has everything."""
        if self.directory is not None:
            try:
                await asyncio.to_thread(how, self.directory)
            except OSError as error:
                log.error("cannot write to %s: %s", self.directory.path, error, extra=self.log_fields)

    def _result(self) -> RunResult:
        store, planner = self.services.store, self.engine.planner
        row = store.run(self.name) or self.row
        return run_result(
            name=self.name,
            phase=row.phase,
            message=row.message,
            strategy=planner.strategy.name,
            seed=self.config.seed,
            scope=planner.scope,
            weights=[tensor.name for tensor in self.spec.weights],
            records=[RoundRecord.from_json(text) for text in store.records(self.name)],
            wall_seconds=(row.ended_at or row.created_at) - row.created_at,
            model_version=row.model_version,
        )


def from_config(row: RunRow) -> dict[str, Any]:
    """The run's job as a table."""
    table: dict[str, Any] = from_json(dict[str, Any], row.config_json, f"configuration of run '{row.name}'")
    return table


def _line(record: RoundRecord) -> str:
    loss = "-" if record.loss is None else f"{record.loss:.4f}"
    tested = "" if record.accuracy is None else f", accuracy {record.accuracy:.4f}"
    return (
        f"round {record.round}: {record.num_updates} of {record.num_tasks} updates,"
        f" {record.latency_seconds:.2f} s, loss {loss}{tested}"
    )
