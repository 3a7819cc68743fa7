"""Between protobuf and the round engine: agents' messages as events, effects as messages to agents."""

from __future__ import annotations

from fedel.core.secret_sharing import SHARE_BYTES
from fedel.core.secure_sum import SEALED_BYTES
from fedel.records import DeviceUsage
from fedel.roles import effects as ef
from fedel.roles import events as ev
from fedel.roles.gate import clean
from fedel.roles.gate_session import (
    objection_to_join,
    objection_to_keys,
    objection_to_progress,
    objection_to_shares,
    plausible,
)
from fedel.roles.run_state import (
    FAILED,
    FINISHED,
    HELD,
    PAUSED,
    QUEUED,
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
from fedel.wire.secure_codec import (
    keys_from_pb,
    member_to_pb,
    names_of,
    proof_from_pb,
    reveal_from_pb,
    shares_from_pb,
    shares_to_pb,
)
from fedel_coordinator.sessions import Device

PHASES = {
    QUEUED: pb.RUN_PHASE_QUEUED,
    WAITING: pb.RUN_PHASE_WAITING,
    RUNNING: pb.RUN_PHASE_RUNNING,
    STOPPING: pb.RUN_PHASE_RUNNING,
    PAUSED: pb.RUN_PHASE_PAUSED,
    HELD: pb.RUN_PHASE_PAUSED,
    FINISHED: pb.RUN_PHASE_FINISHED,
    STOPPED: pb.RUN_PHASE_STOPPED,
    FAILED: pb.RUN_PHASE_FAILED,
}
MAX_WHY = 300
"""Letters of what a person says about a pause or a stop."""
ACTIONS = {
    pb.RUN_ACTION_PAUSE: "pause",
    pb.RUN_ACTION_RESUME: "resume",
    pb.RUN_ACTION_STOP: "stop",
    pb.RUN_ACTION_STOP_NOW: "stop_now",
}

Secure = pb.SecureKeys | pb.SecureShares | pb.SecureReveal
Message = pb.Join | pb.TaskAnswer | pb.TaskProgress | pb.TaskDone | pb.TaskFailed | pb.EvaluationDone | Secure
"""What an agent sends about a run."""
KINDS = {pb.Join: "join", pb.TaskProgress: "progress"}
"""As refusals are counted; the others are of secure aggregation."""


def event_of(client: str, device: Device, message: Message, spec: ModelSpec) -> ev.Event | None:
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
        case pb.EvaluationDone(own=True):
            own = message.accuracy, message.loss, message.num_samples, message.seconds, clean(message.problem)
            return ev.OwnTested(client, message.model_version, *own)
        case pb.EvaluationDone():
            score = message.accuracy, message.loss, message.seconds
            return ev.Evaluated(message.model_version, *score, client=client)
        case pb.SecureKeys() | pb.SecureShares() | pb.SecureReveal():
            return _secure_event(client, message, spec)
    return None


def _secure_event(client: str, message: Secure, spec: ModelSpec) -> ev.Event:
    about = client, message.round_num, message.attempt
    match message:
        case pb.SecureKeys(member=member):
            named = names_of(member.tensors, spec)
            return ev.Keyed(*about, keys_from_pb(member), named, proof_from_pb(member))
        case pb.SecureShares():
            return ev.Shared(*about, shares_from_pb(message.shares))
        case pb.SecureReveal():
            return ev.Revealed(*about, reveal_from_pb(message))


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
        case pb.SecureKeys(member=member):
            return objection_to_keys(
                client, member.client, keys_from_pb(member), member.tensors, proof_from_pb(member), spec
            )
        case pb.SecureShares():
            return objection_to_shares([share.data for share in message.shares], SEALED_BYTES)
        case pb.SecureReveal():
            revealed = (*message.own_masks, *message.masking_keys)
            return objection_to_shares([share.data for share in revealed], SHARE_BYTES)
    return ""


def task_message(run: str, spec: ModelSpec, effect: ef.SendTask) -> pb.SessionResponse:
    task = task_to_pb(
        effect.task,
        run,
        spec,
        model_version=effect.task.round_num,
        accepted_round=effect.accepted_round,
        memory=effect.memory,
        deadline_seconds=effect.deadline_seconds,
        attempt=effect.attempt,
    )
    return pb.SessionResponse(task=task)


def secure_message(
    run: str, spec: ModelSpec, effect: ef.SendRoster | ef.SendGroup | ef.SendUnmask
) -> pb.SessionResponse:
    round_num, attempt = effect.round_num, effect.attempt
    match effect:
        case ef.SendRoster():
            members = [
                member_to_pb(name, keys, effect.named[name], spec, effect.proofs[name])
                for name, keys in effect.keys.items()
            ]
            roster = pb.SecureRoster(run=run, round_num=round_num, attempt=attempt, members=members)
            return pb.SessionResponse(roster=roster)
        case ef.SendGroup():
            shares = shares_to_pb(effect.shares)
            group = pb.SecureGroup(run=run, round_num=round_num, attempt=attempt, shares=shares)
            return pb.SessionResponse(group=group)
        case ef.SendUnmask():
            unmask = pb.SecureUnmask(run=run, round_num=round_num, attempt=attempt, came=effect.came)
            return pb.SessionResponse(unmask=unmask)


def closed_message(run: str, effect: ef.SendClosed) -> pb.SessionResponse:
    closed = pb.RoundClosed(
        run=run,
        round_num=effect.round_num,
        model_version=effect.round_num + 1,
        counted=effect.counted,
    )
    return pb.SessionResponse(closed=closed)


def evaluation_message(run: str, effect: ef.Evaluate | ef.AskOwnTest) -> pb.SessionResponse:
    own = isinstance(effect, ef.AskOwnTest)
    return pb.SessionResponse(evaluate=pb.EvaluationTask(run=run, model_version=effect.version, own=own))


def ended_message(run: str, phase: str) -> pb.SessionResponse:
    return pb.SessionResponse(ended=pb.RunEnded(run=run, phase=PHASES[phase]))


def refusal_message(run: str, reason: str) -> pb.SessionResponse:
    return pb.SessionResponse(refused=pb.JoinRefused(run=run, reason=reason))


def member_of(client: str, device: Device, join: pb.Join) -> Member:
    profile = profile_from_pb(join.profile)
    about = device.device_type, join.can_evaluate, join.num_held_out
    return Member(client, join.num_samples, profile, *about)


def failure_of(message: Message) -> tuple[int, str, str]:
    """The round, what happened and where, as a task that failed or was declined says it."""
    if isinstance(message, pb.TaskFailed):
        return message.round_num, message.message, message.trace
    assert isinstance(message, pb.TaskAnswer)
    return message.round_num, f"declined: {message.reason}", ""


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
