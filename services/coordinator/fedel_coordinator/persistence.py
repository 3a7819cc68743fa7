"""A run's state in the store: which rows each part of it becomes, and the state that the rows make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from google.protobuf import json_format

from fedel.errors import ConfigError
from fedel.records import DeviceUsage, RoundRecord
from fedel.roles.events import Persist
from fedel.roles.planner import Handover
from fedel.roles.run_state import (
    CLOSED,
    COMMITTED,
    MAX_COMMITTED,
    OPEN,
    SEALED,
    Member,
    OpenRound,
    RunState,
    TaskResult,
)
from fedel.roles.secure_round import SecureRound
from fedel.serialisation import from_json, parse_json, to_json
from fedel.types import ModelSpec, Plan, Report, TimingProfile
from fedel.v1 import model_pb2
from fedel.wire.codec import spec_from_pb, spec_to_pb
from fedel_coordinator.sessions import Device
from fedel_coordinator.store import ClientRow, ReportRow, RoundRow, RunRow, Store


@dataclass(frozen=True)
class LoadedRun:
    """A run as the store knows it."""

    state: RunState
    last_record: RoundRecord | None
    """Of the last round that made a model."""
    devices: Mapping[str, Device]
    """By client."""


@dataclass(frozen=True)
class Change:
    """A part of a run's state that is to be kept."""

    effect: Persist
    state: RunState
    device: Device = field(default_factory=Device)
    """Of the effect's client."""


def save(store: Store, run: str, changes: Sequence[Change], now: float) -> None:
    """All of them, in one transaction."""
    with store.together():
        for change in changes:
            _save(store, run, change.effect, change.state, change.device, now)


def _save(store: Store, run: str, effect: Persist, state: RunState, device: Device, now: float) -> None:
    """Write the part of the state that the effect names."""
    open_round, handover = state.open, state.handover
    if effect.part == "phase":
        store.set_phase(run, state.phase, state.message, now if state.ended else None)
    elif effect.part == "forgotten":
        store.delete_client(run, effect.client)
    elif effect.part == "member" and state.members[effect.client].has_left:
        store.set_left(run, effect.client)
    elif effect.part == "member":
        store.put_client(_client_row(run, state.members[effect.client], device))
    elif effect.part == "result":
        assert effect.result is not None
        store.put_report(_report_row(run, effect.result))
    elif effect.part == "plan":
        assert open_round is not None
        plan = plan_to_json(open_round.plan)
        store.put_round(RoundRow(run, open_round.round_num, OPEN, plan, open_round.opened_at))
    elif effect.part == "sealed":
        assert open_round is not None
        store.seal_round(run, open_round.round_num, open_round.sealed_at)
    elif effect.part == "opened":
        assert open_round is not None
        assert open_round.secure is not None
        store.open_masks(run, open_round.round_num, to_json(open_round.secure.to_store()))
    elif effect.part == "committed":
        assert effect.record is not None
        record, version = effect.record, handover.round_num
        store.commit_round(run, record.round, record.to_json(), to_json(handover), version)
    elif effect.part == "closed":
        assert effect.record is not None
        record = effect.record
        best = None
        if effect.best_version is not None and record.accuracy is not None:
            best = (effect.best_version, record.accuracy)
        store.close_round(run, record.round, record.to_json(), best)
    else:
        raise AssertionError(f"unknown part of a state: {effect.part}")


def load(store: Store, row: RunRow) -> LoadedRun:
    """The state that a run goes on from."""
    handover = from_json(Handover, row.state_json, f"state of run '{row.name}'")
    clients = store.clients(row.name)
    last = store.last_round(row.name)
    record = _record(last)
    if last is not None and record is None:
        record = _record(store.round(row.name, last.round_num - 1))
    state = RunState(
        phase=row.phase,
        message=row.message,
        handover=handover,
        members={client.client: _member(client) for client in clients},
        open=_open_round(store, row, last, handover)
        if last and last.status not in (COMMITTED, CLOSED)
        else None,
        committed=_committed(store, row, handover.round_num),
        late_results=_late_results(store, row, handover),
        untrained_rounds=record.tensor_untrained_rounds if record else {},
        best_accuracy=row.best_accuracy,
        best_version=row.best_version if row.best_version >= 0 else None,
    )
    devices = {c.client: Device(c.device_type, c.memory_bytes, c.agent_version) for c in clients}
    return LoadedRun(state, record, devices)


def spec_to_json(spec: ModelSpec) -> str:
    return str(json_format.MessageToJson(spec_to_pb(spec), indent=None))


def spec_from_json(text: str) -> ModelSpec:
    try:
        return spec_from_pb(json_format.ParseDict(parse_json(text), model_pb2.ModelSpec()))
    except (json_format.ParseError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"the model of a run in the database cannot be read: {error}") from None


def plan_to_json(plan: Plan) -> str:
    """Without the global importance: it is the same in every task, and it is in the run's handover."""
    slim = replace(plan, tasks=tuple(replace(task, global_importance={}) for task in plan.tasks))
    return to_json(slim)


def plan_from_json(text: str, global_importance: Mapping[str, float]) -> Plan:
    plan = from_json(Plan, text, "plan of a round")
    tasks = tuple(replace(task, global_importance=global_importance) for task in plan.tasks)
    return replace(plan, tasks=tasks)


def _record(row: RoundRow | None) -> RoundRecord | None:
    """The record of a round that has made a model."""
    return None if row is None or row.record_json == "{}" else RoundRecord.from_json(row.record_json)


def _open_round(store: Store, run: RunRow, row: RoundRow, handover: Handover) -> OpenRound:
    plan = plan_from_json(row.plan_json, handover.global_importance)
    if row.status not in (OPEN, SEALED) or not plan.tasks:
        raise ConfigError(
            f"round {row.round_num} of run '{run.name}' is damaged in the database: its status is"
            f" {row.status!r}, and it has {len(plan.tasks)} tasks"
        )
    results = _results(store, run, row.round_num)
    planned = {task.client for task in plan.tasks}
    return OpenRound(
        round_num=row.round_num,
        plan=plan,
        opened_at=row.opened_at,
        deadline=row.opened_at + plan.deadline_seconds,
        status=row.status,
        done=frozenset(results) & planned,
        results=results,
        sealed_at=row.sealed_at or 0.0,
        secure=_secure(row),
    )


def _committed(store: Store, run: RunRow, round_num: int) -> tuple[RoundRecord, ...]:
    """Records of the rounds before this one that are not closed, oldest first."""
    rows = [store.round(run.name, number) for number in range(max(0, round_num - MAX_COMMITTED), round_num)]
    waiting = [row for row in rows if row is not None and row.status == COMMITTED]
    records = [record for row in waiting if (record := _record(row)) is not None]
    if len(records) < len(waiting):
        raise ConfigError(
            f"run '{run.name}' is damaged in the database: a round that made a model has no record"
        )
    return tuple(records)


def _secure(row: RoundRow) -> SecureRound | None:
    return from_json(SecureRound, row.secure_json, "secrets of a round") if row.secure_json else None


def _late_results(store: Store, run: RunRow, handover: Handover) -> dict[str, TaskResult]:
    """What clients said about tasks of earlier rounds that they were still at work on."""
    rounds = sorted({task.round_num for task in handover.at_work.values()})
    results = [(client, result) for number in rounds for client, result in _results(store, run, number).items()]
    tasks = {(task.client, task.round_num) for task in handover.at_work.values()}
    return {client: result for client, result in results if (client, result.report.round_num) in tasks}


def _results(store: Store, run: RunRow, round_num: int) -> dict[str, TaskResult]:
    return {row.client: _result(row) for row in store.reports(run.name, round_num)}


def _client_row(run: str, member: Member, device: Device) -> ClientRow:
    return ClientRow(
        run=run,
        client=member.client,
        device_type=member.device_type,
        memory_bytes=device.memory_bytes,
        agent_version=device.agent_version,
        num_samples=member.num_samples,
        can_evaluate=member.can_evaluate,
        profile_json=to_json(member.profile),
        has_left=member.has_left,
        num_held_out=member.num_held_out,
    )


def _member(row: ClientRow) -> Member:
    profile = from_json(TimingProfile, row.profile_json, f"timing profile of client '{row.client}'")
    about = row.device_type, row.can_evaluate, row.num_held_out, row.has_left
    return Member(row.client, row.num_samples, profile, *about)


def _report_row(run: str, result: TaskResult) -> ReportRow:
    return ReportRow(
        run=run,
        round_num=result.report.round_num,
        client=result.report.client,
        report_json=to_json(result.report),
        phases_json=to_json(result.phases),
        device_json=to_json(result.device),
        bytes_up=result.bytes_up,
        bytes_down=result.bytes_down,
    )


def _result(row: ReportRow) -> TaskResult:
    where = f"report of client '{row.client}', round {row.round_num}"
    return TaskResult(
        report=from_json(Report, row.report_json, where),
        bytes_up=row.bytes_up,
        bytes_down=row.bytes_down,
        phases=from_json(dict[str, float], row.phases_json, where),
        device=from_json(DeviceUsage, row.device_json, where),
    )
