"""Between protobuf and the round engine: agents' messages as events, effects as messages to agents."""

from __future__ import annotations

from fedel.records import DeviceUsage
from fedel.roles import events as ev
from fedel.roles.gate import clean
from fedel.roles.gate_session import objection_to_join, objection_to_progress, plausible
from fedel.roles.run_state import (
    FAILED,
    FINISHED,
    HELD,
    PAUSED,
    RUNNING,
    STOPPED,
    STOPPING,
    WAITING,
    Member,
    TaskResult,
)
from fedel.types import ModelSpec
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.codec import profile_from_pb, report_from_pb, task_to_pb, window_from_pb
from fedel_coordinator.sessions import Device

PHASES = {
    WAITING: pb.RUN_PHASE_WAITING,
    RUNNING: pb.RUN_PHASE_RUNNING,
    STOPPING: pb.RUN_PHASE_RUNNING,
    PAUSED: pb.RUN_PHASE_PAUSED,
    HELD: pb.RUN_PHASE_PAUSED,
    FINISHED: pb.RUN_PHASE_FINISHED,
    STOPPED: pb.RUN_PHASE_STOPPED,
    FAILED: pb.RUN_PHASE_FAILED,
}
ACTIONS = {
    pb.RUN_ACTION_PAUSE: "pause",
    pb.RUN_ACTION_RESUME: "resume",
    pb.RUN_ACTION_STOP: "stop",
    pb.RUN_ACTION_STOP_NOW: "stop_now",
}

Message = pb.Join | pb.TaskAnswer | pb.TaskProgress | pb.TaskDone | pb.TaskFailed | pb.EvaluationDone
"""What an agent sends about a run."""


def event_of(client: str, device: Device, message: Message) -> ev.Event | None:
    """What a message means to the run; progress means nothing to it."""
    match message:
        case pb.Join():
            return ev.Joined(member_of(client, device, message))
        case pb.TaskAnswer(accepted=True):
            return ev.Accepted(client, message.round_num)
        case pb.TaskAnswer():
            return ev.Declined(client, message.round_num, clean(message.reason))
        case pb.TaskDone():
            return ev.Done(client, _result(message))
        case pb.TaskFailed():
            return ev.Failed(client, message.round_num, clean(message.message))
        case pb.EvaluationDone():
            score = message.accuracy, message.loss, message.seconds
            return ev.Evaluated(message.model_version, *score, client=client)
    return None


def objection_to(client: str, device: Device, message: Message, spec: ModelSpec) -> str:
    """Why a message cannot be taken, for people; empty if it can. Reports and tests are held against the
    client's task by the engine, which knows it."""
    match message:
        case pb.Join():
            return objection_to_join(message.model_digest, member_of(client, device, message), spec)
        case pb.TaskProgress():
            state = message.window
            return objection_to_progress(
                message.phase, window_from_pb(state), state.resets, state.rounds_held, spec
            )
    return ""


def task_message(run: str, spec: ModelSpec, effect: ev.SendTask) -> pb.SessionResponse:
    task = task_to_pb(
        effect.task,
        run,
        spec,
        model_version=effect.task.round_num,
        accepted_round=effect.accepted_round,
        memory=effect.memory,
        deadline_seconds=effect.deadline_seconds,
    )
    return pb.SessionResponse(task=task)


def closed_message(run: str, effect: ev.SendClosed) -> pb.SessionResponse:
    closed = pb.RoundClosed(
        run=run,
        round_num=effect.round_num,
        model_version=effect.round_num + 1,
        counted=effect.counted,
    )
    return pb.SessionResponse(closed=closed)


def evaluation_message(run: str, effect: ev.Evaluate) -> pb.SessionResponse:
    return pb.SessionResponse(evaluate=pb.EvaluationTask(run=run, model_version=effect.version))


def ended_message(run: str, phase: str) -> pb.SessionResponse:
    return pb.SessionResponse(ended=pb.RunEnded(run=run, phase=PHASES[phase]))


def refusal_message(run: str, reason: str) -> pb.SessionResponse:
    return pb.SessionResponse(refused=pb.JoinRefused(run=run, reason=reason))


def member_of(client: str, device: Device, join: pb.Join) -> Member:
    profile = profile_from_pb(join.profile)
    return Member(client, join.num_samples, profile, device.device_type, join.can_evaluate)


def _result(done: pb.TaskDone) -> TaskResult:
    phases, device = done.phases, done.device
    measured = {field.name: value for field, value in device.ListFields()}
    return TaskResult(
        report=report_from_pb(done.report),
        bytes_up=done.bytes_up,
        bytes_down=done.bytes_down,
        phases={
            "download": phases.download,
            "train": phases.train,
            "upload": phases.upload,
            "wait": phases.wait,
        },
        device=plausible(DeviceUsage(**measured)),
    )
