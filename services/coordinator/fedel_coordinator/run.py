"""Drives the round engine of one run: applies events one at a time, and carries the effects out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from fedel import plugins, request_id
from fedel.errors import FedelError, ServiceError
from fedel.job import RunConfig
from fedel.job_code import JobCode
from fedel.records import RoundRecord
from fedel.roles import events as ev
from fedel.roles.coordinator import RoundEngine
from fedel.roles.gate import clean
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_state import FAILED, HELD, STOPPING, RunState, TaskResult
from fedel.selectors import Selector
from fedel.serialisation import from_json
from fedel.wire.retry import Backoff, retrying
from fedel.wire.secure_codec import opened_to_pb
from fedel_coordinator import messages, persistence
from fedel_coordinator.activity import Activity
from fedel_coordinator.change_signal import ChangeSignal, wait_for_event
from fedel_coordinator.errors import RunEnded
from fedel_coordinator.job_code import code_of
from fedel_coordinator.record_keeping import RecordKeeper
from fedel_coordinator.run_members import RunMembers
from fedel_coordinator.run_services import RunServices
from fedel_coordinator.sessions import Device
from fedel_coordinator.shards import OtherRound, OutageHandler, StoppedWaiting
from fedel_coordinator.store import RunRow, StoreUnavailable

log = logging.getLogger(__name__)
WAITS = "waits"
"""Name of background tasks that wait for others; they may be cancelled."""
LOOKS = 12
"""Silence of a client is looked for this many times in the seconds that make it silent."""
HEAVY = (ev.Tick, ev.Committed)
"""Events that may plan a round or make a record: decided in a thread, because other runs must not wait."""


@dataclass(eq=False)
class _Waiting:
    event: ev.Event
    applied: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CoordinatorRun(RunMembers):
    """One run of this process. ``state`` changes only in ``_apply_in_order``, under the lock."""

    def __init__(
        self, row: RunRow, services: RunServices, stored: persistence.LoadedRun, code: JobCode | None = None
    ) -> None:
        """``code`` came with the job; this machine runs it only if it allows that."""
        self.row, self._code = row, code
        self.name = row.name
        self.services = services
        self.config = RunConfig.parse(from_config(row), f"run '{row.name}'")
        self.spec = persistence.spec_from_json(row.spec_json)
        self.selector = Selector.parse(self.config.clients)
        with plugins.only(services.limits.code, code):
            self.engine = RoundEngine(RoundPlanner(self.config, self.spec), relays=True)
        self.state: RunState = stored.state
        self.last_record: RoundRecord | None = stored.last_record
        self.activities = {client: Activity() for client in self.state.members}
        self.change = ChangeSignal()
        self._notices = dict.fromkeys(("database", "aggregators", "queue", "engine", "records"), "")
        """What the run waits for at the moment, for people, by source; the first that is not empty is shown."""
        self.keeper = RecordKeeper(
            row,
            self.engine.planner,
            services.store,
            services.metrics,
            services.directory(row.name),
            lambda notice: self.show("records", notice),
            services.traces,
        )
        self.devices: dict[str, Device] = dict(stored.devices)
        self._lock = asyncio.Lock()
        self._waiting: list[_Waiting] = []
        """Events that wait for the lock, in the order in which they came."""
        self._calls = asyncio.Lock()
        self._woken = asyncio.Event()
        self._wake_at: float | None = None
        self._heard_again, self._looked_at = False, float("-inf")
        self._background: set[asyncio.Task[None]] = set()
        """Events being applied and calls to aggregators; they outlive the session or call that caused them."""

    @staticmethod
    async def load(row: RunRow, services: RunServices) -> CoordinatorRun:
        """The run as the store knows it."""
        stored = await asyncio.to_thread(persistence.load, services.store, row)
        code = await asyncio.to_thread(code_of, services.store, row.name, row.config_json)
        return CoordinatorRun(row, services, stored, code)

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
                await wait_for_event(self._woken, self._rest_seconds())

    def _rest_seconds(self) -> float | None:
        """Until the next deadline; while a round is open or tested, silence is noticed before that."""
        waits = [] if self._wake_at is None else [max(0.0, self._wake_at - self.services.clock())]
        if self.state.open is not None or self.state.committed:
            waits.append(self.services.sessions.silent_seconds / 3)
        return min(waits, default=None)

    def wake(self, heard_again: bool = False) -> None:
        """Look again: the state changed, or a client is heard again."""
        self._heard_again = self._heard_again or heard_again
        self._woken.set()

    async def _report_silence(self) -> None:
        """A look at all clients: not after each message of each of them."""
        sessions = self.services.sessions
        sessions.pulse()
        now = sessions.now()
        if not self._heard_again and now - self._looked_at < sessions.silent_seconds / LOOKS:
            return
        self._heard_again, self._looked_at = False, now
        for member in list(self.state.members.values()):
            client = member.client
            if member.silent == sessions.present(client):
                await self._surely(ev.Found(client) if member.silent else ev.Lost(client))
            elif member.silent and sessions.silent_for(client) > self.services.limits.forget_seconds:
                await self._forget(client)

    async def _forget(self, client: str) -> None:
        await self._surely(ev.Forgotten(client))
        if client not in self.state.members:
            self.activities.pop(client, None)
            self.devices.pop(client, None)
            self.services.sessions.forget(client)

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
            self.show(
                "database", f"the database does not answer ({clean(str(error))}); trying again until it does"
            )

        try:
            await retrying(
                lambda: self.apply(event),
                retried=lambda error: isinstance(error, StoreUnavailable),
                on_failure=on_failure,
                backoff=Backoff(5.0),
            )
        except Exception as error:
            log.exception("%s failed", type(event).__name__, extra=self.log_fields)
            if not isinstance(event, ev.Stuck):
                await self._surely(ev.Stuck(self._reason(error)))

    def _reason(self, error: Exception) -> str:
        """An error as the reason of a pause."""
        if isinstance(error, OtherRound):
            return str(error)
        told = str(error) if isinstance(error, FedelError) else f"{type(error).__name__}: {error}; see the log"
        return clean(f"round {self.state.handover.round_num + 1}: {told}")

    async def _apply(self, event: ev.Event) -> None:
        mine = _Waiting(event)
        self._waiting.append(mine)
        async with self._lock:
            while not mine.applied.done():
                # What agents said while the lock was held is applied together: it is one write for all.
                facts = takewhile(lambda each: isinstance(each.event, ev.FACTS), self._waiting)
                group = list(facts) or self._waiting[:1]
                del self._waiting[: len(group)]
                await self._apply_group(group)
        mine.applied.result()

    async def _apply_group(self, group: Sequence[_Waiting]) -> None:
        try:
            await self._apply_in_order([each.event for each in group])
            for each in group:
                each.applied.set_result(None)
        except Exception as error:
            if len(group) == 1 or isinstance(error, StoreUnavailable):
                for each in group:
                    each.applied.set_exception(error)
            else:
                for each in group:  # only the one at fault fails
                    await self._apply_group([each])
        finally:
            for each in group:
                each.applied.cancel()  # nothing, unless this task was cancelled

    async def _apply_in_order(self, events: Sequence[ev.Event]) -> None:
        before, now = self.state, self.services.clock()
        if isinstance(events[0], HEAVY):
            turns = await asyncio.to_thread(self._decide, events, now)
        else:
            turns = self._decide(events, now)
        changes = [
            persistence.Change(effect, state, self.devices.get(effect.client, Device()))
            for state, effects in turns
            for effect in effects
            if isinstance(effect, ev.Persist)
        ]
        if changes:
            await asyncio.to_thread(persistence.save, self.services.store, self.name, changes, now)
        self.state = state = turns[-1][0]
        self.show("database", "")
        if before.open is None and state.open is not None:
            for activity in self.activities.values():
                activity.phase = "idle"
        for _, effects in turns:
            for effect in effects:
                await self._try_to_carry_out(effect)
        if state.phase == HELD != before.phase:
            log.error("run '%s' is paused: %s", self.name, state.message, extra=self.log_fields)
        if state.phase != before.phase:
            self.services.phase_changed(self.name)
        if state is not before:
            self.wake()
            self.change.notify()

    def _decide(self, events: Sequence[ev.Event], now: float) -> list[tuple[RunState, list[ev.Effect]]]:
        """The state after each of the events, and what is to be done."""
        state, turns = self.state, []
        for event in events:
            state, effects = self.engine.apply(state, event, now)
            turns.append((state, effects))
        return turns

    async def control(self, action: str, by: str = "", why: str = "") -> None:
        """Pause, resume or stop; stopping what has ended already is not an error."""
        if self.ended and not action.startswith("stop"):
            raise RunEnded(f"run '{self.name}' is {self.state.phase}: create a new run to continue training")
        try:
            await self.apply(ev.Controlled(action, by, why))
        except ServiceError as error:
            raise RunEnded(f"run '{self.name}': {error}") from None

    # Effects

    async def _try_to_carry_out(self, effect: ev.Effect) -> None:
        """The state has changed: an effect that fails must not take those after it along."""
        try:
            await self._carry_out(effect)
        except Exception as error:
            log.exception("%s failed", type(effect).__name__, extra=self.log_fields)
            if isinstance(effect, ev.SendTask):
                why = clean(f"its task cannot be sent: {type(error).__name__}: {error}")
                self.post(ev.Failed(effect.task.client, effect.task.round_num, why))
            else:
                self.post(ev.Stuck(self._reason(error)))

    async def _carry_out(self, effect: ev.Effect) -> None:
        push = self.services.sessions.push
        match effect:
            case ev.SendTask():
                push(effect.task.client, self.name, messages.task_message(self.name, self.spec, effect))
            case ev.SendRoster(client) | ev.SendGroup(client) | ev.SendUnmask(client):
                push(client, self.name, messages.secure_message(self.name, self.spec, effect))
            case ev.SendClosed(client):
                push(client, self.name, messages.closed_message(self.name, effect))
            case ev.Ignore(client, reason, kind):
                self._refuse(client, kind, reason)
            case ev.Evaluate(client) | ev.AskOwnTest(client):
                push(client, self.name, messages.evaluation_message(self.name, effect))
            case ev.Open():
                self._start(self._call(lambda: self._open(effect)), WAITS)
            case ev.Seal():
                self._start(self._call(lambda: self._seal(effect)), WAITS)
            case ev.Commit():
                self._start(self._call(lambda: self._commit(effect)), WAITS)
            case ev.Keep():
                self._start(self._call(lambda: self._keep(effect)), WAITS)
            case ev.Close(record):
                self.last_record = record
                await self.keeper.close(record)
            case ev.End(phase, message):
                await self._end(phase, message)
            case ev.Wait(until, why):
                self._wake_at = until
                if why and self.state.open is not None and why != self._notices["engine"]:
                    log.warning("round %d: %s", self.state.open.round_num, why, extra=self.log_fields)
                self.show("engine", why)
            case ev.Persist():
                pass  # done before everything else

    async def _call(self, call: Callable[[], Awaitable[ev.Event | None]]) -> None:
        """A call to the aggregators, whose answer is an event. Calls leave in the order of their effects."""
        request_id.ensure()
        try:
            async with self._calls:
                event = await call()
        except StoppedWaiting:
            event = ev.Interrupted()
        except ServiceError as error:
            event = ev.Stuck(self._reason(error))
        except Exception as error:
            log.exception("a call to the aggregators failed", extra=self.log_fields)
            event = ev.Stuck(self._reason(error))
        if event is not None:
            await self._surely(event)

    async def _open(self, effect: ev.Open) -> None:
        what = effect.round_num, effect.participants
        for report in await self.services.shards.open(self.name, *what, self._outages(), effect.attempt):
            self.post(ev.Done(report.client, TaskResult(report)))  # its update is in the model

    async def _seal(self, effect: ev.Seal) -> ev.Event:
        reports = await self.services.shards.seal(self.name, effect.round_num, self._outages())
        return ev.Sealed(effect.round_num, tuple(reports), effect.attempt)

    async def _commit(self, effect: ev.Commit) -> ev.Event:
        unmask = opened_to_pb(effect.opened, effect.attempt, self.spec) if effect.opened else None
        what = effect.round_num, effect.clients
        return await self.services.shards.commit(self.name, *what, self._outages(), unmask)

    async def _keep(self, effect: ev.Keep) -> ev.Event:
        await self.services.shards.keep(self.name, effect.version, "best", self._outages())
        return ev.Kept(effect.version, effect.score)

    def _outages(self) -> OutageHandler:
        def show(notice: str) -> None:
            if notice and notice != self._notices["aggregators"]:
                log.warning("%s", notice, extra=self.log_fields)
            self.show("aggregators", notice)

        return OutageHandler(show, lambda: self.ended or self.state.phase == STOPPING)

    def show(self, source: str, notice: str) -> None:
        if notice != self._notices[source]:
            self._notices[source] = notice
            self.change.notify()

    async def _end(self, phase: str, message: str) -> None:
        """Write the result, and send the end to every client and aggregator."""
        level = logging.ERROR if phase == FAILED else logging.INFO
        log.log(level, "run '%s' %s. %s", self.name, phase, message, extra=self.log_fields)
        self._notices = dict.fromkeys(self._notices, "")
        for client in self.state.members:
            self.services.sessions.push(client, self.name, messages.ended_message(self.name, phase))
        self._start(self._end_shards(), WAITS)
        await self.keeper.write_result()
        if self._code is not None:
            self._code.close()

    async def _end_shards(self) -> None:
        """A run that is over takes nothing; where this does not arrive, only the aggregator's disk pays."""
        try:
            await self.services.shards.end(self.name)
        except (ServiceError, StoppedWaiting) as error:
            log.warning("an aggregator does not know that the run is over: %s", error, extra=self.log_fields)


def from_config(row: RunRow) -> dict[str, Any]:
    """The run's job as a table."""
    table: dict[str, Any] = from_json(dict[str, Any], row.config_json, f"configuration of run '{row.name}'")
    return table
