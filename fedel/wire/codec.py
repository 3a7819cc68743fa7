"""Convert our types to protobuf messages and back.

Names of tensors are interned: a coordinator has profiles and reports of all devices, which name the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict

from fedel.errors import UpdateRefused
from fedel.types import (
    CLOCK_PACE,
    PLAIN,
    PLAN_PACE,
    BlockBytes,
    BlockTime,
    LocalWork,
    Memory,
    MemoryUse,
    ModelSpec,
    Participant,
    Report,
    Role,
    Speed,
    StepCost,
    Task,
    TensorSpec,
    TensorTime,
    TimingProfile,
    UploadSettings,
    WidthTime,
    Window,
)
from fedel.v1 import aggregator_pb2, model_pb2, task_pb2

_ROLES = {
    Role.WEIGHT: model_pb2.TENSOR_ROLE_WEIGHT,
    Role.EXIT: model_pb2.TENSOR_ROLE_EXIT,
    Role.BUFFER: model_pb2.TENSOR_ROLE_BUFFER,
    Role.FROZEN: model_pb2.TENSOR_ROLE_FROZEN,
}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}


def spec_to_pb(spec: ModelSpec) -> model_pb2.ModelSpec:
    return model_pb2.ModelSpec(
        name=spec.name,
        block_names=spec.block_names,
        tensors=[
            model_pb2.TensorSpec(
                name=t.name, block=t.block, shape=t.shape, role=_ROLES[t.role], dtype=dtype_to_pb(t.dtype)
            )
            for t in spec.tensors
        ],
        stages=spec.stages,
        exit_each=spec.exit_each,
    )


def spec_from_pb(message: model_pb2.ModelSpec) -> ModelSpec:
    return ModelSpec(
        name=message.name,
        block_names=tuple(message.block_names),
        tensors=tuple(
            TensorSpec(
                t.name, t.block, tuple(t.shape), _ROLES_BACK.get(t.role, Role.WEIGHT), _model_dtype(t.dtype)
            )
            for t in message.tensors
        ),
        stages=tuple(message.stages),
        exit_each=message.exit_each,
    )


DTYPES = {"float32": model_pb2.DTYPE_FLOAT32, "uint64": model_pb2.DTYPE_UINT64}
"""Models are float32, masked tensors uint64."""
_DTYPES_BACK: dict[int, str] = {number: dtype for dtype, number in DTYPES.items()}


def dtype_to_pb(dtype: str) -> model_pb2.Dtype.ValueType:
    if dtype not in DTYPES:
        raise UpdateRefused("dtype", f"tensors of type {dtype} cannot be sent: convert them to float32")
    return DTYPES[dtype]


def dtype_from_pb(number: int) -> str:
    if number not in _DTYPES_BACK:
        raise UpdateRefused("dtype", f"unknown dtype {number}: this side only knows {', '.join(DTYPES)}")
    return _DTYPES_BACK[number]


def _model_dtype(number: int) -> str:
    if number != model_pb2.DTYPE_FLOAT32:
        raise UpdateRefused("dtype", f"unknown dtype {number} of a model's tensor: models are float32")
    return "float32"


def task_to_pb(
    task: Task,
    run: str,
    spec: ModelSpec,
    model_version: int,
    accepted_round: int,
    memory: Memory,
    deadline_seconds: float,
    attempt: int = 0,
) -> task_pb2.Task:
    work = task.work
    importance = [task.global_importance.get(t.name, 0.0) for t in spec.tensors]
    return task_pb2.Task(
        run=run,
        round_num=task.round_num,
        client=task.client,
        budget_seconds=task.budget_seconds,
        work=task_pb2.LocalWork(
            num_steps=work.num_steps,
            num_epochs=work.num_epochs,
            batch_size=work.batch_size,
            optimiser=work.optimiser,
            lr=work.lr,
            momentum=work.momentum,
            weight_decay=work.weight_decay,
            clip_norm=work.clip_norm,
        ),
        seed=task.seed,
        settings=task.settings,
        global_importance=importance if task.global_importance else [],
        model_version=model_version,
        accepted_round=accepted_round,
        memory=window_to_pb(memory.window, memory.resets, memory.rounds_held, memory.selected),
        deadline_seconds=deadline_seconds,
        attempt=attempt,
        by_clock=task.pace == CLOCK_PACE,
        speed=task_pb2.Speed(**asdict(task.speed)),
        memory_bytes=task.memory_bytes,
    )


def task_from_pb(message: task_pb2.Task, spec: ModelSpec, upload: UploadSettings = PLAIN) -> Task:
    """``upload`` is that of the run's job, which an agent has from its join."""
    importance: Mapping[str, float] = {
        t.name: value for t, value in zip(spec.tensors, message.global_importance, strict=False)
    }
    return Task(
        round_num=message.round_num,
        client=message.client,
        budget_seconds=message.budget_seconds,
        work=work_from_pb(message.work),
        seed=message.seed,
        settings=dict(message.settings),
        global_importance=importance,
        pace=CLOCK_PACE if message.by_clock else PLAN_PACE,
        speed=speed_from_pb(message.speed),
        memory_bytes=message.memory_bytes,
        upload=upload,
    )


def work_from_pb(message: task_pb2.LocalWork) -> LocalWork:
    return LocalWork(
        num_steps=message.num_steps,
        num_epochs=message.num_epochs,
        batch_size=message.batch_size,
        optimiser=message.optimiser,
        lr=message.lr,
        momentum=message.momentum,
        weight_decay=message.weight_decay,
        clip_norm=message.clip_norm,
    )


def speed_from_pb(message: task_pb2.Speed) -> Speed:
    return Speed(
        slowness=message.slowness or 1.0,
        probe_slowness=message.probe_slowness or 1.0,
        down_rate=message.down_rate,
        up_rate=message.up_rate,
        other_seconds=message.other_seconds,
        wait_seconds=message.wait_seconds,
    )


def window_to_pb(
    window: Window | None, resets: int, rounds_held: int, selected: tuple[str, ...]
) -> task_pb2.WindowState:
    return task_pb2.WindowState(
        end_block=window.end if window else 0,
        front_block=window.front if window else 0,
        resets=resets,
        rounds_held=rounds_held,
        selected=selected,
    )


def window_from_pb(message: task_pb2.WindowState) -> Window | None:
    return Window(message.end_block, message.front_block) if message.front_block else None


def memory_from_pb(message: task_pb2.WindowState) -> Memory:
    return Memory(window_from_pb(message), tuple(message.selected), message.resets, message.rounds_held)


def report_to_pb(report: Report) -> task_pb2.Report:
    return task_pb2.Report(
        client=report.client,
        round_num=report.round_num,
        num_samples=report.num_samples,
        num_steps=report.num_steps,
        effective_steps=report.effective_steps,
        loss=report.loss,
        loss_square=report.loss_square,
        update_norm=report.update_norm,
        forward_seconds=report.cost.forward_seconds,
        backward_seconds=report.cost.backward_seconds,
        probe_forward_seconds=report.probe.forward_seconds,
        probe_backward_seconds=report.probe.backward_seconds,
        train_seconds=report.train_seconds,
        probe_seconds=report.probe_seconds,
        step_seconds=report.step_seconds,
        peak_memory_bytes=report.peak_memory_bytes,
        window=window_to_pb(report.window, report.resets, report.rounds_held, report.selected),
        over_budget=report.over_budget,
        last_share=report.last_share,
    )


def report_from_pb(message: task_pb2.Report) -> Report:
    return Report(
        client=message.client,
        round_num=message.round_num,
        num_samples=message.num_samples,
        num_steps=message.num_steps,
        effective_steps=message.effective_steps,
        loss=message.loss,
        loss_square=message.loss_square,
        update_norm=message.update_norm,
        cost=StepCost(message.forward_seconds, message.backward_seconds),
        probe=StepCost(message.probe_forward_seconds, message.probe_backward_seconds),
        train_seconds=message.train_seconds,
        probe_seconds=message.probe_seconds,
        step_seconds=message.step_seconds,
        peak_memory_bytes=message.peak_memory_bytes,
        window=window_from_pb(message.window),
        resets=message.window.resets,
        rounds_held=message.window.rounds_held,
        selected=tuple(map(sys.intern, message.window.selected)),
        over_budget=message.over_budget,
        last_share=message.last_share or 1.0,
    )


def participant_to_pb(participant: Participant) -> aggregator_pb2.Participant:
    return aggregator_pb2.Participant(
        client=participant.client,
        round_num=participant.round_num,
        num_samples=participant.num_samples,
        max_steps=participant.max_steps,
        max_effective_steps=participant.max_effective_steps,
    )


def participant_from_pb(message: aggregator_pb2.Participant) -> Participant:
    return Participant(
        client=message.client,
        round_num=message.round_num,
        num_samples=message.num_samples,
        max_steps=message.max_steps,
        max_effective_steps=message.max_effective_steps,
    )


def profile_to_pb(profile: TimingProfile) -> task_pb2.TimingProfile:
    return task_pb2.TimingProfile(
        device=profile.device,
        model=profile.model,
        batch_size=profile.batch_size,
        tensors=[
            task_pb2.TensorTime(
                name=t.name, block=t.block, grad_seconds=t.grad_seconds, update_seconds=t.update_seconds
            )
            for t in profile.tensors
        ],
        blocks=[
            task_pb2.BlockTime(
                forward_seconds=b.forward_seconds,
                exit_forward_seconds=b.exit_forward_seconds,
                exit_backward_seconds=b.exit_backward_seconds,
                frozen_forward_seconds=b.frozen_forward_seconds,
            )
            for b in profile.blocks
        ],
        widths=[
            task_pb2.WidthTime(
                width=w.width, forward_seconds=w.forward_seconds, backward_seconds=w.backward_seconds
            )
            for w in profile.widths
        ],
        overhead_seconds=profile.overhead_seconds,
        calibration=profile.calibration,
        source=profile.source,
        memory=memory_use_to_pb(profile.memory) if profile.memory else None,
    )


def profile_from_pb(message: task_pb2.TimingProfile) -> TimingProfile:
    return TimingProfile(
        device=message.device,
        model=message.model,
        batch_size=message.batch_size,
        tensors=tuple(
            TensorTime(sys.intern(t.name), t.block, t.grad_seconds, t.update_seconds) for t in message.tensors
        ),
        blocks=tuple(
            BlockTime(
                b.forward_seconds, b.exit_forward_seconds, b.exit_backward_seconds, b.frozen_forward_seconds
            )
            for b in message.blocks
        ),
        widths=tuple(WidthTime(w.width, w.forward_seconds, w.backward_seconds) for w in message.widths),
        overhead_seconds=message.overhead_seconds,
        calibration=message.calibration,
        source=message.source,
        memory=memory_use_from_pb(message.memory) if message.HasField("memory") else None,
    )


def memory_use_to_pb(use: MemoryUse) -> task_pb2.MemoryUse:
    return task_pb2.MemoryUse(
        base_bytes=use.base_bytes,
        input_bytes=use.input_bytes,
        optimiser_values=use.optimiser_values,
        blocks=[
            task_pb2.BlockBytes(
                activation_bytes=b.activation_bytes,
                working_bytes=b.working_bytes,
                frozen_bytes=b.frozen_bytes,
                output_bytes=b.output_bytes,
                exit_bytes=b.exit_bytes,
            )
            for b in use.blocks
        ],
        limit_bytes=use.limit_bytes,
    )


def memory_use_from_pb(message: task_pb2.MemoryUse) -> MemoryUse:
    return MemoryUse(
        base_bytes=message.base_bytes,
        input_bytes=message.input_bytes,
        optimiser_values=message.optimiser_values,
        blocks=tuple(
            BlockBytes(b.activation_bytes, b.working_bytes, b.frozen_bytes, b.output_bytes, b.exit_bytes)
            for b in message.blocks
        ),
        limit_bytes=message.limit_bytes,
    )
