"""How agents are shown: one value, encoded as protobuf or JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fedel.selectors import Selector
from fedel.serialisation import from_json
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.protocol import WORKS_WITH
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.fleet import labels_of
from fedel_coordinator.store import AgentRow

AWAY, SILENT, REFUSED, READY, WORKING = "away", "silent", "refused", "ready", "working"
DRAINING, DRAINED = "draining", "drained"


@dataclass(frozen=True)
class ErrorView:
    at: float
    run: str
    round: int | None
    message: str
    trace: str


@dataclass(frozen=True)
class AgentView:
    """An agent. Times are Unix seconds; what is not known is ``None``."""

    name: str
    state: str
    connected: bool
    cordoned: bool
    last_seen: float
    device_type: str
    agent_version: str
    protocol: int
    memory_bytes: int | None
    up_bytes_per_second: float | None
    down_bytes_per_second: float | None
    certificate_end: float | None
    labels: dict[str, str] = field(default_factory=dict)
    operator_labels: dict[str, str] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    last_error: ErrorView | None = None


def views(
    coordinator: Coordinator, names: Iterable[str], selector: Selector | None = None, with_trace: bool = False
) -> Iterable[AgentView]:
    """One after the other, so that a page of them costs no more than that page."""
    fleet, live = coordinator.fleet, [run for run in coordinator.runs.values() if not run.ended]
    working = frozenset[str]().union(*(run.state.working for run in live))
    live_names = {run.name for run in live}
    for name in names:
        row = fleet.row(name)
        if selector is not None and not selector.matches(name, row.device_type, labels_of(row)):
            continue
        runs = sorted(coordinator.sessions.joined(name) & live_names)
        yield _view(coordinator, row, name in working, runs, with_trace)


def _view(
    coordinator: Coordinator, row: AgentRow, is_working: bool, runs: list[str], with_trace: bool
) -> AgentView:
    sessions = coordinator.sessions
    return AgentView(
        name=row.name,
        state=_state(row, is_working, sessions.is_open(row.name), sessions.present(row.name)),
        connected=sessions.is_open(row.name),
        cordoned=row.cordoned,
        last_seen=coordinator.fleet.last_seen(row.name),
        device_type=row.device_type,
        agent_version=row.agent_version,
        protocol=row.protocol,
        memory_bytes=row.memory_bytes or None,
        up_bytes_per_second=row.up_rate or None,
        down_bytes_per_second=row.down_rate or None,
        certificate_end=row.certificate_end or None,
        labels=dict(labels_of(row)),
        operator_labels=from_json(dict[str, str], row.operator_labels_json, "labels"),
        runs=runs,
        last_error=_error(row, with_trace) if row.error_at else None,
    )


def _state(row: AgentRow, is_working: bool, is_open: bool, is_present: bool) -> str:
    if row.protocol not in WORKS_WITH:
        return REFUSED
    if row.cordoned:
        return DRAINING if is_working else DRAINED
    if not is_open:
        return AWAY
    if not is_present:
        return SILENT
    return WORKING if is_working else READY


def _error(row: AgentRow, with_trace: bool) -> ErrorView:
    round_num = row.error_round if row.error_round >= 0 else None
    trace = row.error_trace if with_trace else ""
    return ErrorView(row.error_at, row.error_run, round_num, row.error_message, trace)


def agent_status(view: AgentView) -> pb.AgentStatus:
    error = view.last_error
    return pb.AgentStatus(
        name=view.name,
        device_type=view.device_type,
        labels=view.labels,
        operator_labels=view.operator_labels,
        agent_version=view.agent_version,
        protocol=view.protocol,
        memory_bytes=view.memory_bytes or 0,
        up_rate=view.up_bytes_per_second or 0.0,
        down_rate=view.down_bytes_per_second or 0.0,
        certificate_end=view.certificate_end or 0.0,
        last_seen=view.last_seen,
        connected=view.connected,
        cordoned=view.cordoned,
        state=view.state,
        runs=view.runs,
        last_error=None
        if error is None
        else pb.AgentError(
            at=error.at,
            run=error.run,
            round_num=-1 if error.round is None else error.round,
            message=error.message,
            trace=error.trace,
        ),
    )
