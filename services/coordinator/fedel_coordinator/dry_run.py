"""A dry run: an offer of a run that is never created. Agents answer it with their profiles, as to any offer."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import closing, nullcontext
from dataclasses import dataclass, field

from fedel import plugins
from fedel.errors import ConfigError, FedelError
from fedel.job_code import JobCode
from fedel.roles.forecast import Forecast, forecast
from fedel.roles.gate import clean
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_state import STOPPED, Member
from fedel.selectors import Selector
from fedel.serialisation import to_json
from fedel.types import ModelSpec, Speed
from fedel.v1 import coordinator_pb2 as pb
from fedel_coordinator import messages
from fedel_coordinator.change_signal import wait_for_event
from fedel_coordinator.coordinator import Coordinator, checked
from fedel_coordinator.errors import NotNow
from fedel_coordinator.job_code import code_of
from fedel_coordinator.sessions import Session

MAX_WAIT_SECONDS, MAX_DRY_RUNS = 3600.0, 4
"""Agents work for a dry run, so that only a few go on at a time."""


@dataclass(frozen=True)
class LeftOut:
    """An agent that the plan does not have, and why."""

    client: str
    why: str


@dataclass(frozen=True)
class PlannedRun:
    forecast: Forecast | None
    """``None`` if no agent can take part."""
    left_out: tuple[LeftOut, ...]


@dataclass
class DryRun:
    """The answers to one offer."""

    name: str
    spec: ModelSpec
    asked: frozenset[str]
    members: dict[str, Member] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    all_answered: asyncio.Event = field(default_factory=asyncio.Event)

    def receive(self, session: Session, message: messages.Message) -> None:
        """What an agent says about the offer; anything but a join or a failure is of no interest."""
        client = session.client
        if client not in self.asked:
            return
        if isinstance(message, pb.TaskFailed):
            self.failed[client] = clean(message.message)
        elif isinstance(message, pb.Join):
            wrong = messages.objection_to(client, session.device, message, self.spec)
            if wrong:
                self.failed[client] = clean(wrong)
            else:
                self.members[client] = messages.member_of(client, session.device, message)
        if self.asked <= self.members.keys() | self.failed.keys():
            self.all_answered.set()


async def plan_run(coordinator: Coordinator, request: pb.PlanRunRequest, spec: ModelSpec) -> str:
    """The plan as JSON."""
    if not 0 < request.wait_seconds <= MAX_WAIT_SECONDS:
        raise ConfigError(f"wait_seconds is above 0 and up to {MAX_WAIT_SECONDS:g}")
    if len(coordinator.dry_runs) >= MAX_DRY_RUNS:
        raise NotNow(f"{MAX_DRY_RUNS} plans are being made already: try again when one of them is there")
    name = f"plan-{secrets.token_hex(4)}"
    code = await asyncio.to_thread(code_of, coordinator.store, name, request.config_json)
    with closing(code) if code else nullcontext():
        return await _plan(coordinator, request, spec, name, code)


async def _plan(
    coordinator: Coordinator, request: pb.PlanRunRequest, spec: ModelSpec, name: str, code: JobCode | None
) -> str:
    with plugins.only(coordinator.config.code, code):
        config = checked(name, request.config_json, spec)
        planner = RoundPlanner(config, spec)
    selector, here = Selector.parse(config.clients), coordinator.sessions.clients
    asked = frozenset(client for client in here if coordinator.fleet.allows(client, selector))
    dry = DryRun(name, spec, asked)
    coordinator.dry_runs[name] = dry
    try:
        offer = coordinator.offer_of(name, to_json(config.table()), spec, instance=name)
        for client in asked:
            coordinator.sessions.push_to(client, offer)
        if asked:
            await wait_for_event(dry.all_answered, request.wait_seconds)
    finally:
        del coordinator.dry_runs[name]
        for client in asked:
            coordinator.sessions.push_to(client, messages.ended_message(name, STOPPED))
    found = await asyncio.to_thread(_forecast, coordinator, planner, dry)
    return to_json(PlannedRun(found, tuple(_left_out(coordinator, dry, selector, request.wait_seconds))))


def _forecast(coordinator: Coordinator, planner: RoundPlanner, dry: DryRun) -> Forecast | None:
    members = [dry.members[client] for client in sorted(dry.members)]
    if not members:
        return None
    rows = {client: coordinator.fleet.row(client) for client in dry.members}
    links = {client: Speed(down_rate=row.down_rate, up_rate=row.up_rate) for client, row in rows.items()}
    try:
        return forecast(planner, members, links)
    except FedelError:
        raise
    except Exception as error:
        raise ConfigError(
            f"method '{planner.strategy.name}' cannot be planned without training:"
            f" {type(error).__name__}: {clean(str(error))}"
        ) from error


def _left_out(coordinator: Coordinator, dry: DryRun, selector: Selector, seconds: float) -> list[LeftOut]:
    found = []
    for name in coordinator.fleet.names():
        if name in dry.members:
            continue
        row = coordinator.fleet.row(name)
        if name in dry.failed:
            why = f"could not join: {dry.failed[name]}"
        elif name in dry.asked:
            why = f"did not answer in {seconds:g} s: it may be busy with a task, or still measure"
        elif row.cordoned:
            why = "is cordoned"
        elif not coordinator.fleet.allows(name, selector):
            why = "is not among the job's clients"
        else:
            why = "is not connected"
        found.append(LeftOut(name, why))
    return found
