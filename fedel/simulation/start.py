"""From a job to a run: data, model, fleet, workers; then round by round to its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedel.data.partition import digest, split
from fedel.errors import ConfigError
from fedel.roles.coordinator import Director
from fedel.simulation import devices
from fedel.simulation.executors import Executor, Processes, Serial, cores
from fedel.simulation.job import Job
from fedel.simulation.profiles import base_profile
from fedel.simulation.result import run_result
from fedel.simulation.run import Progress, Simulation
from fedel.simulation.store import RunFolder, Standing, write
from fedel.simulation.workers import Worker
from fedel.simulation.workload import TorchWorkload
from fedel.strategies.base import PAPER_CLOCK
from fedel.training.factory import fresh_model, make_data
from fedel.training.profile_io import load_profile, save_profile
from fedel.types import TimingProfile

EXECUTORS = ("serial", "processes", "ray")


@dataclass(frozen=True)
class Session:
    """A run that is ready to be played."""

    simulation: Simulation
    director: Director
    folder: RunFolder
    facts: dict[str, Any]
    """What the result tells besides what the rounds do."""


@contextmanager
def session(
    job: Job,
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
    parts = split(data, job.partition, run.seed)
    kept = path / "profile.json"
    base = load_profile(kept, model.spec) if kept.exists() else base_profile(job.fleet.base, run, model, data)
    clients = devices.build(job.fleet, base, model.spec, list(map(len, parts)), job.network, run.seed)
    director = Director(run, model.spec, job.scope or PAPER_CLOCK)
    standing = folder.open(job.table()) or Standing(model.tensors())
    save_profile(base, kept)
    workload = make_workload(
        model,
        data,
        {client.name: part for client, part in zip(clients, parts, strict=True)},
        {client.name: client.profile for client in clients},
        job.device,
    )
    participants = run.rounds.num_participants or len(clients)
    with workers(
        Worker(director.strategy, workload), executor, min(num_workers or cores(), participants)
    ) as pool:
        simulation = Simulation(
            director,
            clients,
            pool,
            standing,
            faults=job.faults,
            evaluation=job.evaluation,
            num_test_samples=workload.num_test_samples,
        )
        yield Session(simulation, director, folder, _facts(base, digest(parts)))


@contextmanager
def workers(worker: Worker, executor: str, num_workers: int) -> Iterator[Executor]:
    """An executor, closed at the end of the block."""
    if num_workers < 1:
        raise ConfigError(f"--workers {num_workers}: at least one worker is needed; 0 takes one a core")
    pool: Executor
    if executor == "serial":
        pool = Serial(worker)
    elif executor == "processes":
        pool = Processes(worker, num_workers)
    elif executor == "ray":
        from fedel.simulation.on_ray import OnRay

        pool = OnRay(worker, num_workers)
    else:
        raise ConfigError(f"executor {executor!r} is none of: {', '.join(EXECUTORS)}")
    try:
        yield pool
    finally:
        pool.close()


def play_all(
    session: Session, on_round: Callable[[dict[str, Any]], None], progress: Progress | None = None
) -> dict[str, Any]:
    """Every round that is left, each of them on disk before the next; then the result."""
    simulation, folder, director = session.simulation, session.folder, session.director
    tested = [record["accuracy"] for record in folder.records() if record["accuracy"] is not None]
    best, every = max(tested, default=-1.0), director.run.rounds.keep_every
    while not simulation.is_over:
        record = simulation.play(progress)
        folder.commit(simulation.standing, record)
        done = simulation.standing.state.round_num
        if record["accuracy"] is not None and record["accuracy"] > best:
            best = record["accuracy"]
            folder.keep("best.safetensors", done)
        if every and done % every == 0:
            folder.keep(f"model-{done}.safetensors", done)
        on_round(record)
    folder.keep("model.safetensors", simulation.standing.state.round_num)
    result = run_result(folder.path.name, director, folder.records(), session.facts)
    write(folder.path / "result.json", (json.dumps(result, indent=2) + "\n").encode())
    return result


def _facts(base: TimingProfile, split_digest: str) -> dict[str, Any]:
    return {"profile": {"device": base.device, "source": base.source}, "partition": split_digest}
