"""Between protobuf and the round engine: agents' messages as events, effects as messages to agents."""

from __future__ import annotations

import math

from google.protobuf import json_format

from fedel.records import DeviceUsage
from fedel.roles import events as ev
from fedel.roles.run_state import (
    FAILED,
    FINISHED,
    PAUSED,
    RUNNING,
    STOPPED,
    STOPPING,
    WAITING,
    Member,
    TaskResult,
)
from fedel.serialisation import from_json
from fedel.types import ModelSpec, TimingProfile
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.codec import profile_from_pb, report_from_pb, task_to_pb
from fedel_coordinator.sessions import Device

PHASES = {
    WAITING: pb.RUN_PHASE_WAITING,
    RUNNING: pb.RUN_PHASE_RUNNING,
    STOPPING: pb.RUN_PHASE_RUNNING,
    PAUSED: pb.RUN_PHASE_PAUSED,
    FINISHED: pb.RUN_PHASE_FINISHED,
    STOPPED: pb.RUN_PHASE_STOPPED,
    FAILED: pb.RUN_PHASE_FAILED,
}
ACTIONS = {pb.RUN_ACTION_PAUSE: "pause", pb.RUN_ACTION_RESUME: "resume", pb.RUN_ACTION_STOP: "stop"}

Message = pb.Join | pb.TaskAnswer | pb.TaskProgress | pb.TaskDone | pb.TaskFailed | pb.EvaluationDone
"""What an agent sends about a run."""


def event_of(client: str, device: Device, message: Message) -> ev.Event | None:
    """What a message means to the run; progress means nothing to it."""
    match message:
        case pb.Join():
            return ev.Joined(_member(client, device, message))
        case pb.TaskAnswer(accepted=True):
            return ev.Accepted(client, message.round_num)
        case pb.TaskAnswer():
            return ev.Declined(client, message.round_num, message.reason)
        case pb.TaskDone():
            return ev.Done(client, _result(message))
        case pb.TaskFailed():
            return ev.Failed(client, message.round_num, message.message)
        case pb.EvaluationDone():
            return ev.Evaluated(message.model_version, message.accuracy, message.loss, message.seconds)
    return None


def objection(join: pb.Join, spec: ModelSpec) -> str:
    """Why a client cannot join, for people; empty if it can."""
    if join.model_digest != spec.digest:
        return (
            f"the agent built a model with the digest '{join.model_digest}', run '{join.run}' trains"
            f" '{spec.digest}' ({spec.name}): install the same version of FedEL and of the model's code"
        )
    if join.num_samples < 1:
        return f"the agent holds {join.num_samples} training samples: give it some in its [data] section"
    return _objection_to_profile(profile_from_pb(join.profile), spec)


def _objection_to_profile(profile: TimingProfile, spec: ModelSpec) -> str:
    """Every plan reads every profile, so one bad profile would stop the run for all."""
    if len(profile.blocks) != spec.num_blocks or set(profile.by_name) != {t.name for t in spec.weights}:
        return (
            f"the agent's timing profile has {len(profile.blocks)} blocks and {len(profile.tensors)} tensors,"
            f" model '{spec.name}' has {spec.num_blocks} blocks and {len(spec.weights)} weights: profile the"
            " device again"
        )
    seconds = [s for t in profile.tensors for s in (t.grad_seconds, t.update_seconds)]
    seconds += [b.forward_seconds for b in profile.blocks]
    if not all(math.isfinite(s) and s >= 0 for s in seconds) or sum(seconds) <= 0:
        return "the agent's timing profile contains non-positive times: profile the device again"
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


def _member(client: str, device: Device, join: pb.Join) -> Member:
    profile = profile_from_pb(join.profile)
    return Member(client, join.num_samples, profile, device.device_type, join.can_evaluate)


def _result(done: pb.TaskDone) -> TaskResult:
    phases = done.phases
    device = json_format.MessageToJson(done.device, preserving_proto_field_name=True, indent=None)
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
        device=from_json(DeviceUsage, device, "device state"),
    )
