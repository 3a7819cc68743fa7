"""The gate of a session: what an agent says about itself, its data, its speed and its tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace

from fedel.core.secure_sum import KEY_BYTES, Keys, is_key
from fedel.records import DeviceUsage
from fedel.roles.gate import (
    MAX_BYTES,
    MAX_COUNT,
    MAX_NAME,
    MAX_NUMBER,
    MAX_SECONDS,
    clean,
    objection_to_name,
    objection_to_numbers,
    objection_to_report,
    objection_to_window,
)
from fedel.roles.run_state import Member, TaskResult
from fedel.security.signed_keys import MAX_BYTES as MAX_PROOF
from fedel.security.signed_keys import Proof
from fedel.selectors import objection_to_labels
from fedel.types import (
    BlockBytes,
    BlockTime,
    MemoryUse,
    ModelSpec,
    Participant,
    TensorTime,
    TimingProfile,
    Window,
)

MAX_SAMPLES = 10**9
MAX_STEP_SECONDS = 1e4
"""A training step that takes hours is a wrong measurement."""
MIN_STEP_SECONDS = 1e-9
MAX_WIDTHS = 100
MAX_CALIBRATION = 1e6
MAX_OPTIMISER_VALUES = 16
PHASES = ("download", "train", "upload")
"""What a client can be at, while it works on a task."""
SENSORS = {"power_watts": (0.0, 1e5), "energy_joules": (0.0, 1e12), "temperature_celsius": (-100.0, 1000.0)}
"""What a sensor can measure; a reading outside is left out, because sensors fail by themselves."""


def objection_to_hello(
    client: str,
    device_type: str,
    agent_version: str,
    memory_bytes: int,
    labels: Mapping[str, str] | None = None,
    protocol: int = 0,
) -> str:
    return (
        objection_to_name(client, "client's name")
        or (objection_to_name(device_type, "device type") if device_type else "")
        or (objection_to_name(agent_version, "agent's version") if agent_version else "")
        or objection_to_numbers({"memory_bytes": memory_bytes}, MAX_BYTES)
        or objection_to_numbers({"protocol": protocol}, MAX_COUNT)
        or objection_to_labels(labels or {})
    )


def objection_to_join(digest: str, member: Member, spec: ModelSpec) -> str:
    """Every plan reads every member, so one that is wrong would hinder the run for all."""
    if digest != spec.digest:
        return (
            f"the agent built a model with the digest '{clean(digest, MAX_NAME)}', the run trains"
            f" '{spec.digest}' ({spec.name}): install the same version of FedEL and of the model's code"
        )
    if not 1 <= member.num_samples <= MAX_SAMPLES:
        return (
            f"the agent holds {member.num_samples} training samples, which is not between 1 and"
            f" {MAX_SAMPLES:g}: see its [data] section"
        )
    if not 0 <= member.num_held_out <= MAX_SAMPLES:
        return f"the agent holds {member.num_held_out} samples out, which is not between 0 and {MAX_SAMPLES:g}"
    objection = objection_to_profile(member.profile, spec)
    return f"the agent's timing profile: {objection}: profile the device again" if objection else ""


def objection_to_profile(profile: TimingProfile, spec: ModelSpec) -> str:
    blocks_of = {tensor.name: tensor.block for tensor in spec.weights}
    names = [tensor.name for tensor in profile.tensors]
    if len(profile.blocks) != spec.num_blocks or sorted(names) != sorted(blocks_of):
        return (
            f"it has {len(profile.blocks)} blocks and {len(names)} tensors, model '{spec.name}' has"
            f" {spec.num_blocks} blocks and {len(blocks_of)} weights, or their names differ"
        )
    if any(tensor.block != blocks_of[tensor.name] for tensor in profile.tensors):
        return f"its tensors are in other blocks than those of model '{spec.name}'"
    for text in (profile.device, profile.model, profile.source):
        if len(text) > MAX_NAME or not text.isprintable():
            return f"a name in it has more than {MAX_NAME} letters, or some that cannot be printed"
    if not 1 <= profile.batch_size <= MAX_COUNT:
        return f"batch_size is {profile.batch_size}, which is not between 1 and {MAX_COUNT}"
    if not 0 < profile.calibration <= MAX_CALIBRATION:
        return f"calibration is {profile.calibration:g}, which is not above 0 and up to {MAX_CALIBRATION:g}"
    return _objection_to_widths(profile) or _objection_to_seconds(profile) or _objection_to_memory(profile)


def _objection_to_memory(profile: TimingProfile) -> str:
    if (use := profile.memory) is None:
        return ""
    if len(use.blocks) != len(profile.blocks):
        return f"it has the memory of {len(use.blocks)} blocks and the seconds of {len(profile.blocks)}"
    if not 0 <= use.optimiser_values <= MAX_OPTIMISER_VALUES:
        return f"optimiser_values is {use.optimiser_values}, which is not between 0 and {MAX_OPTIMISER_VALUES}"
    parts: tuple[MemoryUse | BlockBytes, ...] = (use, *use.blocks)
    for part in parts:
        sizes = {f.name: getattr(part, f.name) for f in fields(part) if f.name.endswith("_bytes")}
        if objection := objection_to_numbers(sizes, MAX_BYTES):
            return objection
    return ""


def _objection_to_widths(profile: TimingProfile) -> str:
    if len(profile.widths) > MAX_WIDTHS or not all(0 < w.width <= 1 for w in profile.widths):
        return f"widths are shares above 0 and up to 1, at most {MAX_WIDTHS} of them"
    for w in profile.widths:
        seconds = {"forward_seconds": w.forward_seconds, "backward_seconds": w.backward_seconds}
        if objection := objection_to_numbers(seconds, MAX_STEP_SECONDS):
            return f"at width {w.width:g}, {objection}"
    return ""


def _objection_to_seconds(profile: TimingProfile) -> str:
    if objection := objection_to_numbers({"overhead_seconds": profile.overhead_seconds}, MAX_STEP_SECONDS):
        return objection
    parts: tuple[TensorTime | BlockTime, ...] = (*profile.tensors, *profile.blocks)
    for part in parts:
        seconds = {f.name: getattr(part, f.name) for f in fields(part) if f.name.endswith("_seconds")}
        if objection := objection_to_numbers(seconds, MAX_STEP_SECONDS):
            return objection
    # Each clock is a divisor somewhere: the backward pass alone, and the whole step.
    backward = sum(t.grad_seconds + t.update_seconds for t in profile.tensors)
    whole = backward + sum(b.forward_seconds for b in profile.blocks) + profile.overhead_seconds
    if backward < MIN_STEP_SECONDS or whole > MAX_STEP_SECONDS:
        return (
            f"its backward pass takes {backward:g} s and its whole step {whole:g} s, which is not between"
            f" {MIN_STEP_SECONDS:g} s and {MAX_STEP_SECONDS:g} s"
        )
    return ""


def objection_to_progress(
    phase: str, window: Window | None, resets: int, rounds_held: int, spec: ModelSpec
) -> str:
    if phase not in PHASES:
        return f"phase is '{clean(phase, MAX_NAME)}', which is not one of: {', '.join(PHASES)}"
    return objection_to_window(window, spec) or objection_to_numbers(
        {"resets": resets, "rounds_held": rounds_held}, MAX_COUNT
    )


def objection_to_result(result: TaskResult, spec: ModelSpec, participant: Participant) -> str:
    """``participant`` is what the task of the client allows it."""
    return (
        objection_to_report(result.report, spec, participant)
        or objection_to_numbers({f"phase {clean(k, 20)}": s for k, s in result.phases.items()}, MAX_SECONDS)
        or objection_to_numbers({"bytes_up": result.bytes_up, "bytes_down": result.bytes_down}, MAX_BYTES)
    )


def objection_to_keys(
    client: str, named: str, keys: Keys, tensors: Sequence[int], proof: Proof, spec: ModelSpec
) -> str:
    """Secure aggregation: everyone else has to use these keys, so that a wrong one would hinder all."""
    if named != client:
        return f"keys of client '{clean(named, MAX_NAME)}'"
    if len(keys.own_mask_digest) != KEY_BYTES or not (is_key(keys.sealing) and is_key(keys.masking)):
        return "one of its keys of secure aggregation is not a key"
    if len(proof.certificate) + len(proof.signature) > MAX_PROOF:
        return f"certificate and signature of its keys have more than {MAX_PROOF} bytes"
    if len(set(tensors)) != len(tensors) or not all(0 <= place < len(spec.tensors) for place in tensors):
        return "it names tensors that the model does not have, or one of them twice"
    return ""


def objection_to_shares(shares: Iterable[bytes], num_bytes: int) -> str:
    if any(len(share) != num_bytes for share in shares):
        return f"its shares of secure aggregation do not all have {num_bytes} bytes"
    return ""


def objection_to_score(accuracy: float, loss: float, seconds: float | None) -> str:
    """A test of a model."""
    return (
        objection_to_numbers({"accuracy": accuracy}, 1.0)
        or objection_to_numbers({"loss": abs(loss)}, MAX_NUMBER)
        or objection_to_numbers({"seconds": seconds or 0.0}, MAX_SECONDS)
    )


def objection_to_own_score(
    accuracy: float, loss: float, seconds: float | None, num_samples: int, member: Member
) -> str:
    """A test of a model on a client's own data: as many samples as it said when it joined."""
    if num_samples != member.num_held_out:
        return f"it is of {num_samples} samples, and the client holds {member.num_held_out} out"
    return objection_to_score(accuracy, loss, seconds)


def plausible(usage: DeviceUsage) -> DeviceUsage:
    """Without the readings that no sensor can have measured."""
    wrong: dict[str, None] = {}
    for name, (least, most) in SENSORS.items():
        value = getattr(usage, name)
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            wrong[name] = None
    return replace(usage, **wrong)
