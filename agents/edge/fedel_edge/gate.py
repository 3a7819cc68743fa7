"""The agent's gate: what a server says is checked here before anything else looks at it.

Each function holds one message against what the device knows (the model it built, its profile, its owner's
limits) and returns what is wrong with it, for people; an empty text lets it pass. Pure: no file, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from fedel.core.timing import full_step
from fedel.job import RunConfig
from fedel.roles.gate import (
    MAX_BYTES,
    MAX_COUNT,
    MAX_NAME,
    MAX_NUMBER,
    MAX_SECONDS,
    clean,
    objection_to_name,
    objection_to_numbers,
)
from fedel.types import OPTIMISERS, LocalWork, ModelSpec, Speed, Trainer
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import task_pb2
from fedel.wire.codec import speed_from_pb, work_from_pb

MAX_CONFIG = 1_000_000
"""Letters of a run's configuration; real ones have a few thousand."""
MAX_SHARDS = 1000
MAX_SETTINGS = 1000
MAX_STEPS = 10_000_000
MAX_BATCH = 65_536
HEARTBEAT_SECONDS = 5.0
"""Where a coordinator asks for something senseless."""


@dataclass(frozen=True)
class Limits:
    """The ``[limits]`` of an agent: the most that a server can ask of this device."""

    max_task_seconds: float = 86_400.0
    """A task that would take longer is declined; one that does take longer is given up."""
    max_prepare_seconds: float = 3_600.0
    """Preparing a run (its code, its data, measuring a profile) is given up after this time."""
    max_runs: int = 16
    """Runs that this device takes part in at the same time, and whose files it keeps."""
    max_disk_bytes: int = 20_000_000_000
    """All files of runs together."""

    def __post_init__(self) -> None:
        numbers = self.max_task_seconds, self.max_prepare_seconds, self.max_runs, self.max_disk_bytes
        if not all(number > 0 for number in numbers):
            raise ValueError(
                "max_task_seconds, max_prepare_seconds, max_runs and max_disk_bytes must be above 0"
            )


def objection_to_offer(offer: pb.RunOffer) -> str:
    """Before anything of it is parsed."""
    if len(offer.config_json) > MAX_CONFIG:
        return f"its configuration has {len(offer.config_json)} letters, more than {MAX_CONFIG}"
    if not 1 <= len(offer.shards) <= MAX_SHARDS:
        return f"it has {len(offer.shards)} aggregators, which is not between 1 and {MAX_SHARDS}"
    return (
        objection_to_name(offer.run, "name of the run")
        or objection_to_name(offer.model_digest, "digest of the model")
        or (offer.instance and objection_to_name(offer.instance, "instance"))
        or _first(objection_to_name(shard.address, "address of an aggregator") for shard in offer.shards)
    )


def objection_to_job(job: RunConfig) -> str:
    """What a device uses of a job before the first task: it measures with this batch size."""
    return objection_to_work(job.work)


def objection_to_work(work: LocalWork) -> str:
    if work.optimiser not in OPTIMISERS:
        return f"the optimiser is '{clean(work.optimiser, 20)}', which is neither sgd nor adamw"
    return (
        objection_to_numbers({"batch_size": work.batch_size}, MAX_BATCH, least=1)
        or objection_to_numbers({"num_steps": work.num_steps, "num_epochs": work.num_epochs}, MAX_STEPS)
        or objection_to_numbers(
            {
                "lr": work.lr,
                "momentum": work.momentum,
                "weight_decay": work.weight_decay,
                "clip_norm": work.clip_norm,
            },
            MAX_NUMBER,
        )
    )


def objection_to_shards(shards: Iterable[pb.Shard], spec: ModelSpec) -> str:
    """Each tensor is at one aggregator at most; one that names none has all."""
    names = [name for shard in shards for name in shard.tensors]
    if len(names) != len(set(names)) or not spec.by_name.keys() >= set(names):
        return "its aggregators hold tensors that the model does not have, or one of them twice"
    return ""


def objection_to_task(
    task: task_pb2.Task, client: str, job: RunConfig, trainer: Trainer, slowdown: float, limits: Limits
) -> str:
    if task.client != client:
        return f"the task is for client '{clean(task.client, MAX_NAME)}', this is '{client}'"
    return (
        objection_to_numbers({"round_num": task.round_num, "model_version": task.model_version}, MAX_COUNT)
        or objection_to_numbers({"accepted_round": task.accepted_round}, task.round_num, least=-1)
        or objection_to_numbers({"seed": task.seed}, 2**63 - 1)
        or objection_to_numbers(
            {"budget_seconds": task.budget_seconds, "deadline_seconds": task.deadline_seconds}, MAX_SECONDS
        )
        or objection_to_speed(speed_from_pb(task.speed))
        or objection_to_numbers({"memory_bytes": task.memory_bytes}, MAX_BYTES)
        or _objection_to_time(task.work, job, trainer, slowdown, limits)
        or _objection_to_settings(task.settings)
        or _objection_to_importance(task.global_importance, trainer.spec)
        or _objection_to_memory(task.memory, trainer.spec)
    )


def objection_to_speed(speed: Speed) -> str:
    return objection_to_numbers(
        {"slowness": speed.slowness, "probe_slowness": speed.probe_slowness}, MAX_NUMBER, least=1 / MAX_NUMBER
    ) or objection_to_numbers(asdict(speed), MAX_NUMBER)


def _objection_to_time(
    message: task_pb2.LocalWork, job: RunConfig, trainer: Trainer, slowdown: float, limits: Limits
) -> str:
    work = work_from_pb(message)
    if wrong := objection_to_work(work):
        return wrong
    if work.batch_size > job.work.batch_size:
        return f"batch_size is {work.batch_size}; this device measured {job.work.batch_size}, as the job says"
    steps = work.steps_for(trainer.num_samples)
    cost = full_step(trainer.profile, trainer.spec.exit_each)
    seconds = steps * (cost.forward_seconds + cost.backward_seconds) * slowdown
    if steps > MAX_STEPS or seconds > limits.max_task_seconds:
        return (
            f"{steps} steps of the whole model take about {seconds:.3g} s here, and the owner of this device "
            f"allows {limits.max_task_seconds:g} s: ask for fewer steps, or raise limits.max_task_seconds there"
        )
    return ""


def _objection_to_settings(settings: Mapping[str, float]) -> str:
    if len(settings) > MAX_SETTINGS:
        return f"it has {len(settings)} settings, more than {MAX_SETTINGS}"
    return _first(objection_to_name(name, "name of a setting") for name in settings) or objection_to_numbers(
        settings, MAX_NUMBER, least=-MAX_NUMBER
    )


def _objection_to_importance(values: Iterable[float], spec: ModelSpec) -> str:
    values = list(values)
    if values and len(values) != len(spec.tensors):
        return f"global_importance has {len(values)} values, the model has {len(spec.tensors)} tensors"
    return objection_to_numbers({f"global_importance {n}": v for n, v in enumerate(values)}, MAX_NUMBER)


def _objection_to_memory(memory: task_pb2.WindowState, spec: ModelSpec) -> str:
    end, front = memory.end_block, memory.front_block
    if (end or front) and not 1 <= end <= front <= spec.num_blocks:
        return f"its window is blocks {end} to {front}, the model has {spec.num_blocks}"
    names = set(memory.selected)
    if len(names) != len(memory.selected) or not names <= spec.by_name.keys():
        return "it selected tensors that the model does not have, or one of them twice"
    return objection_to_numbers({"resets": memory.resets, "rounds_held": memory.rounds_held}, MAX_COUNT)


def objection_to_evaluation(task: pb.EvaluationTask) -> str:
    return objection_to_numbers({"model_version": task.model_version}, MAX_COUNT)


def heartbeat_seconds(welcome: pb.Welcome) -> float:
    """How often to send a sign of life; never so often that it is a burden."""
    asked = welcome.heartbeat_seconds
    return HEARTBEAT_SECONDS if objection_to_numbers({"": asked}, 3600.0, least=0.01) else asked


def _first(objections: Iterable[str]) -> str:
    return next(filter(None, objections), "")
