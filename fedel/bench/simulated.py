"""One measurement of the simulator, in a process of its own (``sections/simulator.py``).

CPU seconds, so that other work on the machine does not count. The time of the steps comes from the trainer:
from the first batch to the last optimiser step. The rest is the cost of simulating: loading the model,
preparing a job, importance and selection around the probe, copying and folding updates, writing the round to
disk.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedel.bench import plain_training
from fedel.bench.sections.simulator import IN_ROUND, NUM_CLIENTS, NUM_STEPS
from fedel.simulation import start
from fedel.simulation.job import SimulationConfig
from fedel.simulation.workers import EvaluationPart, Tally
from fedel.simulation.workload import TorchWorkload
from fedel.strategies.base import WrappedTrainer
from fedel.types import LocalWork, Tensors, Trained, Trainer, TrainSpec, Window

HERE = plain_training.__name__


class Spent:
    """CPU seconds by activity, and steps."""

    steps = around_steps = probe = tests = 0.0
    num_steps = 0


class TimedTrainer(WrappedTrainer):
    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        begin = time.process_time()
        try:
            return super().probe(model, window, work, seed)
        finally:
            Spent.probe += time.process_time() - begin

    def train(self, model: Tensors, job: TrainSpec) -> Trained:
        begin = time.process_time()
        trained = super().train(model, job)
        Spent.steps += trained.seconds
        Spent.around_steps += time.process_time() - begin - trained.seconds
        Spent.num_steps += trained.num_steps
        return trained


class TimedWorkload(TorchWorkload):
    def trainer(self, client: str) -> Trainer:  # type: ignore[override]
        return TimedTrainer(super().trainer(client))

    def test(self, model: Tensors, part: EvaluationPart) -> Sequence[Tally]:
        begin = time.process_time()
        try:
            return super().test(model, part)
        finally:
            Spent.tests += time.process_time() - begin


def job(strategy: str, rounds: int, num_clients: int = NUM_CLIENTS) -> SimulationConfig:
    return SimulationConfig.parse(
        {
            "strategy": {"name": strategy},
            "workload": {"model": f"{HERE}:model", "data": f"{HERE}:data"},
            "rounds": {"num_rounds": rounds, "num_participants": min(IN_ROUND, num_clients)},
            "work": {
                "num_steps": NUM_STEPS,
                "batch_size": plain_training.BATCH_SIZE,
                "lr": plain_training.LR,
                "momentum": plain_training.MOMENTUM,
                "weight_decay": 0.0,
            },
            "fleet": {"base": "flops"},
            "partition": {"num_clients": num_clients, "method": "iid"},
        }
    )


def simulated(strategy: str, rounds: int, folder: Path) -> dict[str, Any]:
    settings = job(strategy, rounds + 1)
    with start.session(settings, folder / "run", executor="serial", make_workload=TimedWorkload) as session:
        session.simulation.play()  # the first round warms up
        Spent.steps = Spent.around_steps = Spent.probe = Spent.tests = 0.0
        Spent.num_steps = 0
        begin = time.process_time()
        for _ in range(rounds):
            record = session.simulation.play()
            session.folder.commit(session.simulation.checkpoint, record)
        total = time.process_time() - begin - Spent.tests
    rest = total - Spent.steps - Spent.around_steps - Spent.probe
    return {
        "step_seconds": total / Spent.num_steps,
        "steps": Spent.steps,
        "probe": Spent.probe,
        "around_steps": Spent.around_steps,
        "everything_else": rest,
        "overhead": (Spent.around_steps + rest) / (Spent.steps + Spent.probe),
    }


def plain_loop(rounds: int) -> dict[str, Any]:
    x, y, _, _ = plain_training.data()
    images, labels = torch.from_numpy(x), torch.from_numpy(np.asarray(y, np.int64))
    network = plain_training.model()
    plain_training.train(network, images, labels, 0)
    begin = time.process_time()
    for number in range(rounds * IN_ROUND):
        plain_training.train(network, images, labels, number)
    return {"step_seconds": (time.process_time() - begin) / (rounds * IN_ROUND * NUM_STEPS)}


def memory(num_clients: int, folder: Path) -> dict[str, Any]:
    """At most, in one process, over two rounds with the same number of clients in each."""
    with start.session(job("fedel", 2, num_clients), folder / "run", executor="serial") as session:
        for _ in range(2):
            record = session.simulation.play()
            session.folder.commit(session.simulation.checkpoint, record)
    return {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def main() -> None:
    way, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if way == "plain loop":
        found = plain_loop(number)
    elif way == "memory":
        found = memory(number, folder)
    else:
        found = simulated(way, number, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
