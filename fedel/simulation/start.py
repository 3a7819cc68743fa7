"""From a job to a run: data, model, fleet, workers; then round by round to its end."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedel.data.model_input import ModelInput
from fedel.data.partition import digest, hold_out, split
from fedel.errors import ConfigError
from fedel.files import write_atomic
from fedel.records import Origin, RoundRecord, RunResult, run_result
from fedel.roles.coordinator import RoundEngine
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_state import FINISHED
from fedel.simulation import devices
from fedel.simulation.executors import Executor, Processes, Serial, cores
from fedel.simulation.job import SimulationConfig
from fedel.simulation.profiles import base_profile
from fedel.simulation.run import Progress, Simulation
from fedel.simulation.store import Checkpoint, RunFolder
from fedel.simulation.together import NUM_TOGETHER
from fedel.simulation.workers import Worker
from fedel.simulation.workload import TorchWorkload
from fedel.strategies.base import PAPER_CLOCK
from fedel.training.factory import first_model, fresh_model, make_data
from fedel.training.initial import origin_of
from fedel.training.profile_io import load_profile, save_profile
from fedel.types import TimingProfile

EXECUTORS = ("serial", "processes", "ray")


@dataclass(frozen=True)
class Session:
    """A run that is ready to be played."""

    simulation: Simulation
    engine: RoundEngine
    folder: RunFolder
    facts: dict[str, Any]
    """What the result says in addition to the rounds."""

    @property
    def num_played(self) -> int:
        return self.simulation.checkpoint.handover.round_num


@contextmanager
def session(
    job: SimulationConfig,
    path: Path,
    *,
    resume: bool = False,
    executor: str = "processes",
    num_workers: int = 0,
    make_workload: type[TorchWorkload] = TorchWorkload,
) -> Iterator[Session]:
    """Set up a run in the directory ``path``; its workers end with the block."""
    run, folder = job.run, RunFolder(path)
    folder.check(job.table(), resume)
    data = make_data(run)
    model = fresh_model(run, data)
    whole = split(data, job.partition, run.seed)
    parts, held_out = zip(*(hold_out(part, job.partition.held_out, run.seed) for part in whole), strict=True)
    kept = path / "profile.json"
    if not resume:  # of a run that failed before its first round was over, perhaps with another model
        kept.unlink(missing_ok=True)
    base = load_profile(kept, model.spec) if kept.exists() else base_profile(job.fleet.base, run, model, data)
    clients = devices.build(job.fleet, base, model.spec, list(map(len, parts)), job.network, run.seed)
    clients = [replace(c, num_held_out=len(held)) for c, held in zip(clients, held_out, strict=True)]
    checkpoint = folder.open(job.table())
    if checkpoint is None:
        folder.note(origin_of(run.workload))
        checkpoint = Checkpoint((first_model(run, data) if run.workload.initial else model).tensors())
    save_profile(base, kept)
    ModelInput.of(data).save(path)
    workload = make_workload(
        model,
        data,
        {client.name: part for client, part in zip(clients, parts, strict=True)},
        {client.name: client.profile for client in clients},
        job.device,
        job.compute,
        {client.name: rows for client, rows in zip(clients, held_out, strict=True)},
    )
    # A simulated fleet is complete from the start: there is no client to wait for.
    rounds = replace(run.rounds, min_clients=1)
    planner = RoundPlanner(replace(run, rounds=rounds), model.spec, job.scope or PAPER_CLOCK)
    engine = RoundEngine(planner, tests_itself=workload.num_test_samples > 0)
    participants = run.rounds.num_participants or len(clients)
    worker = Worker(engine.planner.strategy, workload)
    with workers(worker, executor, min(num_workers or cores(), participants)) as pool:
        simulation = Simulation(
            engine,
            clients,
            pool,
            checkpoint,
            faults=job.faults,
            evaluation=job.evaluation,
            num_test_samples=workload.num_test_samples,
            num_together=NUM_TOGETHER if job.compute == "fast" else 1,
        )
        yield Session(simulation, engine, folder, _facts(base, digest(whole), folder.origin()))


@contextmanager
def workers(worker: Worker, executor: str, num_workers: int) -> Iterator[Executor]:
    """An executor, closed at the end of the block."""
    if num_workers < 1:
        raise ConfigError(f"--workers {num_workers}: at least one worker is needed; 0 takes one per core")
    pool: Executor
    if executor == "serial":
        pool = Serial(worker)
    elif executor == "processes":
        pool = Processes(worker, num_workers)
    elif executor == "ray":
        from fedel.simulation.on_ray import OnRay

        pool = OnRay(worker, num_workers)
    else:
        raise ConfigError(f"executor {executor!r} is not one of: {', '.join(EXECUTORS)}")
    try:
        yield pool
    finally:
        pool.close()


def play_all(
    session: Session, on_round: Callable[[RoundRecord], None], progress: Progress | None = None
) -> RunResult:
    """Every round that is left, each of them on disk before the next; then the result."""
    simulation, folder, engine = session.simulation, session.folder, session.engine
    best = max((record.accuracy for record in folder.records() if record.accuracy is not None), default=-1.0)
    every = engine.run.rounds.keep_every
    while not simulation.is_over:
        record = simulation.play(progress)
        folder.commit(simulation.checkpoint, record)
        done = simulation.checkpoint.handover.round_num
        if record.accuracy is not None and record.accuracy > best:
            best = record.accuracy
            folder.keep("best.safetensors", simulation.checkpoint)
        if every and done % every == 0:
            folder.keep(f"model-{done}.safetensors", simulation.checkpoint)
        on_round(record)
    folder.keep("model.safetensors", simulation.checkpoint)
    result = _result(session, folder.records())
    write_atomic(folder.path / "result.json", result.to_json())
    return result


def _result(session: Session, records: Sequence[RoundRecord]) -> RunResult:
    planner = session.engine.planner
    return run_result(
        name=session.folder.path.name,
        phase=FINISHED,
        strategy=planner.strategy.name,
        seed=planner.run.seed,
        scope=planner.scope,
        weights=[tensor.name for tensor in planner.spec.weights],
        records=records,
        wall_seconds=sum(record.wall_seconds or 0.0 for record in records),
        virtual=True,
        average=planner.run.server.average,
        versions={"torch": importlib.metadata.version("torch")},
        **session.facts,
    )


def _facts(base: TimingProfile, split_digest: str, origin: Origin | None) -> dict[str, Any]:
    profile = {"device": base.device, "source": base.source}
    return {"profile": profile, "partition": split_digest, "origin": origin}
