"""What agents say about one run: through the gate, and to the round engine as events."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from fedel.job import RunConfig
from fedel.roles import events as ev
from fedel.roles.coordinator import RoundEngine
from fedel.roles.gate import clean
from fedel.roles.run_state import RunState, TaskResult
from fedel.selectors import Selector
from fedel.types import ModelSpec
from fedel.v1 import coordinator_pb2 as pb
from fedel_coordinator import messages
from fedel_coordinator.activity import Activity
from fedel_coordinator.change_signal import ChangeSignal
from fedel_coordinator.run_services import RunServices
from fedel_coordinator.sessions import Device, Session
from fedel_coordinator.store import StoreUnavailable

log = logging.getLogger(__name__)


class RunMembers(ABC):
    """The part of a run that its clients speak to; ``CoordinatorRun`` drives the rest."""

    name: str
    services: RunServices
    config: RunConfig
    spec: ModelSpec
    engine: RoundEngine
    state: RunState
    selector: Selector
    activities: dict[str, Activity]
    devices: dict[str, Device]
    change: ChangeSignal

    @abstractmethod
    async def apply(self, event: ev.Event) -> None:
        """Apply an event to its end, even if the caller is cancelled. ``StoreUnavailable``: nothing changed."""

    @property
    @abstractmethod
    def log_fields(self) -> dict[str, Any]:
        """Run and round."""

    def allows(self, client: str) -> bool:
        """Whether the client may get tasks from the next round on: its labels fit, it is not cordoned, and if
        the job hands out parts of the data, there is one for it."""
        return self.config.split.takes(client) and self.services.fleet.allows(client, self.selector)

    async def receive(self, session: Session, message: messages.Message) -> None:
        """A message of an agent about this run. What does not pass the gate is counted and logged."""
        client, fields = session.client, self.log_fields | {"client": session.client}
        if isinstance(message, pb.Join) and self.state.ended:
            return session.push(messages.ended_message(self.name, self.state.phase))
        if objection := self._objection(session, message):
            is_join = isinstance(message, pb.Join)
            self._refuse(client, messages.KINDS.get(type(message), "secure"), objection)
            if is_join:
                self.services.fleet.failed(client, self.name, -1, objection)
                if client not in self.state.members:
                    await self.apply(ev.Failed(client, -1, clean(objection)))
                session.push(messages.refusal_message(self.name, objection))
            return None
        if isinstance(message, pb.TaskProgress):
            return self._progressed(client, message)
        event = messages.event_of(client, session.device, message, self.spec)
        assert event is not None
        if isinstance(event, ev.Joined):
            return await self._join(session, event)
        if isinstance(event, ev.Failed):
            self.services.metrics.tasks_failed.labels(self.name).inc()
            log.warning("%s failed: %s", client, event.message, extra=fields)
        if isinstance(event, ev.Failed | ev.Declined):
            self.services.fleet.failed(client, self.name, *messages.failure_of(message))
        await self.apply(event)
        if isinstance(event, ev.Done):
            self._show_done(client, event.result)
        return None

    def _objection(self, session: Session, message: messages.Message) -> str:
        members, most = self.state.members, self.services.limits.max_clients
        if isinstance(message, pb.Join) and session.client not in members:
            if len(members) >= most:
                return f"the run has {most} clients, and takes no more (max_clients of the coordinator)"
            if not self.allows(session.client):
                return f"the agent is cordoned, or not among the job's clients ('{self.config.clients}')"
        return messages.objection_to(session.client, session.device, message, self.spec)

    def _refuse(self, client: str, kind: str, reason: str) -> None:
        self.services.metrics.refused.labels(kind).inc()
        log.warning("refused: %s", clean(reason), extra=self.log_fields | {"client": client, "kind": kind})
        self.services.sessions.count_refusal(client)

    def _progressed(self, client: str, progress: pb.TaskProgress) -> None:
        open_round = self.state.open
        if open_round is not None and progress.round_num == open_round.round_num and client in open_round.tasks:
            self._activity(client).progressed(progress)
            self.change.notify()

    def _show_done(self, client: str, result: TaskResult) -> None:
        open_round = self.state.open
        if open_round is not None and open_round.results.get(client) is result:
            self._activity(client).done(result, open_round.tasks.get(client), self.engine.planner.scope)
            self.services.fleet.measured(client, result)
            self.change.notify()

    async def _join(self, session: Session, event: ev.Joined) -> None:
        client, fields = session.client, self.log_fields | {"client": session.client}
        self.devices[client] = session.device
        session.joined.add(self.name)
        try:
            await self.apply(ev.Joined(replace(event.member, withheld=not self.allows(client))))
        except StoreUnavailable:
            session.joined.discard(self.name)
            raise
        self._activity(client)
        log.info("%s joined", client, extra=fields)

    async def settle_member(self, client: str) -> None:
        """The labels of a client changed, or it was cordoned; a task that it works on goes on."""
        member = self.state.members.get(client)
        if member is not None and member.withheld == self.allows(client):
            await self.apply(ev.Withheld(client, not member.withheld))

    async def left(self, client: str) -> None:
        log.info("%s left", client, extra=self.log_fields | {"client": client})
        await self.apply(ev.Left(client))
        self._activity(client).phase = "idle"

    def _activity(self, client: str) -> Activity:
        return self.activities.setdefault(client, Activity())
