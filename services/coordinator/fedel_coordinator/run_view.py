"""How runs are shown: one value for live runs and for those that ended earlier, encoded as protobuf or JSON."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedel.job import RunConfig
from fedel.records import ClientRecord, RoundRecord
from fedel.roles.run_state import ENDED, HELD, OPEN, PAUSED, SEALED, STOPPING, WAITING, OpenRound
from fedel.types import ModelSpec
from fedel_coordinator import persistence
from fedel_coordinator.activity import Activity
from fedel_coordinator.change_signal import ChangeSignal
from fedel_coordinator.errors import RunEnded
from fedel_coordinator.run import CoordinatorRun, from_config
from fedel_coordinator.sessions import Device
from fedel_coordinator.store import ClientRow, RunRow, Store

ROUND_PHASES = {OPEN: "train", SEALED: "fold"}
LOST = "lost"
"""Phase of a client whose update will not count in the open round."""


@dataclass(frozen=True)
class OpenRoundView:
    round_num: int
    phase: str
    """``train``, ``fold``, or, if no later round is open, ``evaluate``."""
    opened_at: float
    deadline_seconds: float
    num_tasks: int
    num_done: int
    num_lost: int

    @staticmethod
    def of(open_round: OpenRound) -> OpenRoundView:
        return OpenRoundView(
            round_num=open_round.round_num,
            phase=ROUND_PHASES[open_round.status],
            opened_at=open_round.opened_at,
            deadline_seconds=open_round.plan.deadline_seconds,
            num_tasks=len(open_round.plan.tasks),
            num_done=len(open_round.done),
            num_lost=len(open_round.lost),
        )

    @staticmethod
    def of_test(record: RoundRecord) -> OpenRoundView:
        """The round whose test is awaited."""
        return OpenRoundView(
            round_num=record.round,
            phase="evaluate",
            opened_at=record.opened_at,
            deadline_seconds=record.deadline_seconds,
            num_tasks=record.num_tasks,
            num_done=record.num_updates,
            num_lost=len(record.refused),
        )


@dataclass(frozen=True)
class RunView:
    """A run without its clients."""

    run: str
    config: dict[str, Any]
    config_json: str
    phase: str
    message: str
    num_rounds: int
    rounds_closed: int
    budget_seconds: float
    created_at: float
    best_accuracy: float | None
    best_version: int | None
    open_round: OpenRoundView | None = None
    num_clients: int = 0
    """That joined; 0 for a run that ended before this process started."""
    num_connected: int = 0

    @property
    def stops_after_round(self) -> bool:
        return self.phase == STOPPING


@dataclass(frozen=True)
class ClientView:
    """A client of a run: what it does now, or else what its last record says."""

    client: str
    device_type: str
    num_samples: int
    agent_version: str = ""
    memory_bytes: int = 0
    connected: bool = False
    present: bool = False
    silent_seconds: float = 0.0
    phase: str = "idle"
    window: tuple[int, int] | None = None
    resets: int = 0
    rounds_held: int = 0
    train_seconds: float | None = None
    budget_seconds: float | None = None
    deviation: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    problem: str = ""
    """Why nothing of it counts in the open round, or did not in the last; empty if all is well."""

    @property
    def counted_seconds(self) -> float | None:
        """Seconds of the last round that count against T_th."""
        if self.deviation is None or self.budget_seconds is None:
            return self.train_seconds
        return self.budget_seconds * (1 + self.deviation)


class ShownRun(Protocol):
    """A run, whether this process drives it or it ended before this process started."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def ended(self) -> bool: ...

    @property
    def change(self) -> ChangeSignal: ...

    def view(self) -> RunView: ...

    async def clients(self) -> dict[str, ClientView]:
        """By name."""
        ...

    async def control(self, action: str, by: str = "", why: str = "") -> None:
        """Pause, resume or stop; ``by`` says who wants it, where that is known."""
        ...


class LiveRun:
    """A run that this process drives or has driven."""

    def __init__(self, run: CoordinatorRun) -> None:
        self._run = run
        self.name, self.spec, self.change = run.name, run.spec, run.change
        self.control = run.control

    @property
    def ended(self) -> bool:
        return self._run.ended

    def view(self) -> RunView:
        run, state, last = self._run, self._run.state, self._run.last_record
        open_round = state.open
        shown = None
        budget = last.budget_seconds if last else 0.0
        if open_round is not None:
            budget = open_round.plan.tasks[0].budget_seconds
            shown = OpenRoundView.of(open_round)
        elif state.committed:
            shown = OpenRoundView.of_test(state.committed[0])
        return RunView(
            run=run.name,
            config=from_config(run.row),
            config_json=run.row.config_json,
            phase=PAUSED if state.phase == HELD else state.phase,
            message=_joined(state.message, "" if state.phase == HELD else _waits_for(run)),
            num_rounds=run.config.rounds.num_rounds,
            rounds_closed=state.handover.round_num,
            budget_seconds=budget,
            created_at=run.row.created_at,
            best_accuracy=state.best_accuracy,
            best_version=state.best_version,
            open_round=shown,
            num_clients=len(state.members),
            num_connected=sum(run.services.sessions.ready(client, run.name) for client in state.members),
        )

    async def clients(self) -> dict[str, ClientView]:
        last = self._run.last_record
        entries = {entry.client: entry for entry in last.clients} if last else {}
        return {name: self._client(name, entries.get(name)) for name in sorted(self._run.state.members)}

    def _client(self, name: str, entry: ClientRecord | None) -> ClientView:
        run = self._run
        member, sessions = run.state.members[name], run.services.sessions
        device, activity = run.devices.get(name) or Device(), run.activities.get(name) or Activity()
        figures, lost = _figures(entry), run.state.open.lost if run.state.open else {}
        if activity.window is not None:
            figures["window"] = (activity.window.end, activity.window.front)
            figures["resets"] = max(activity.resets, figures["resets"])
            figures["rounds_held"] = activity.rounds_held
        if activity.budget_seconds:
            figures |= {
                "train_seconds": activity.train_seconds,
                "budget_seconds": activity.budget_seconds,
                "deviation": activity.counted_seconds / activity.budget_seconds - 1,
                "bytes_up": activity.bytes_up,
                "bytes_down": activity.bytes_down,
            }
        return ClientView(
            client=name,
            device_type=member.device_type,
            num_samples=member.num_samples,
            agent_version=device.agent_version,
            memory_bytes=device.memory_bytes,
            connected=sessions.ready(name, run.name),
            present=not member.has_left and sessions.present(name),
            silent_seconds=sessions.silent_for(name),
            phase=LOST if name in lost else activity.phase,
            problem=lost.get(name) or _refused(name, run.last_record),
            **figures,
        )


@dataclass(frozen=True)
class EndedRun:
    """A run that ended before this process started, or that could not be loaded."""

    row: RunRow
    store: Store
    change: ChangeSignal = field(default_factory=ChangeSignal)
    ended: bool = True

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def spec(self) -> ModelSpec:
        return persistence.spec_from_json(self.row.spec_json)

    def view(self) -> RunView:
        row, config = self.row, _complete(from_config(self.row))
        return RunView(
            run=row.name,
            config=config,
            config_json=row.config_json,
            phase=row.phase,
            message=row.message,
            num_rounds=config["rounds"]["num_rounds"],
            rounds_closed=row.model_version,
            budget_seconds=0.0,
            created_at=row.created_at,
            best_accuracy=row.best_accuracy,
            best_version=row.best_version if row.best_version >= 0 else None,
        )

    async def clients(self) -> dict[str, ClientView]:
        """As the last round saw them."""
        rows = await asyncio.to_thread(self.store.clients, self.name)
        last = await asyncio.to_thread(self.store.last_round, self.name)
        has_record = last is not None and last.record_json != "{}"
        record = RoundRecord.from_json(last.record_json) if last and has_record else None
        return {row.client: _stored_client(row, record) for row in rows}

    async def control(self, action: str, by: str = "", why: str = "") -> None:  # noqa: ARG002
        if self.row.phase not in ENDED:
            raise RunEnded(f"run '{self.name}' cannot go on: {self.row.message}")
        if not action.startswith("stop"):
            raise RunEnded(f"run '{self.name}' is {self.row.phase}: create a new run to continue training")


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """A job that can be shown: sections that a damaged one lacks are as in a job without settings."""
    known = RunConfig(strategy={"name": "unknown"}).table()
    complete = dict(config)
    for section in ("strategy", "rounds"):
        kept = config.get(section)
        kept = kept if isinstance(kept, dict) else {}
        complete[section] = {
            **kept,
            **{
                key: kept[key] if isinstance(kept.get(key), type(value)) else value
                for key, value in known[section].items()
            },
        }
    return complete


def _waits_for(run: CoordinatorRun) -> str:
    """What the run waits for; before its first round, with how many of the connected agents may join it."""
    if not run.notice or run.state.phase != WAITING:
        return run.notice
    connected = run.services.sessions.clients
    num_allowed = sum(map(run.allows, connected))
    if not connected:
        return f"{run.notice}; no agent is connected"
    if num_allowed == len(connected):
        return run.notice
    chosen = f", clients = '{run.config.clients}'" if run.config.clients else ""
    return f"{run.notice}; of {len(connected)} connected agents, {num_allowed} may take part{chosen}"


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _stored_client(row: ClientRow, record: RoundRecord | None) -> ClientView:
    return ClientView(
        client=row.client,
        device_type=row.device_type,
        num_samples=row.num_samples,
        agent_version=row.agent_version,
        memory_bytes=row.memory_bytes,
        problem=_refused(row.client, record),
        **_figures(record.client(row.client) if record else None),
    )


def _refused(client: str, record: RoundRecord | None) -> str:
    return record.refused.get(client, "") if record is not None else ""


def _figures(entry: ClientRecord | None) -> dict[str, Any]:
    """What the last record says about a client."""
    if entry is None:
        return {"resets": 0}
    names = ("window", "resets", "train_seconds", "budget_seconds", "deviation", "bytes_up", "bytes_down")
    return {name: getattr(entry, name) for name in names}
