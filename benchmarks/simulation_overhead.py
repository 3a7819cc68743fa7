"""What a simulation costs besides training: 100 clients, 25 per round, a small real model, in one process.

    python benchmarks/simulation_overhead.py
    python benchmarks/simulation_overhead.py --strategy fedavg --model vgg16 --width 0.25 --data cifar10

CPU seconds, so that other work on the machine does not count. The time of the steps comes from the trainer:
from the first batch to the last optimiser step. The rest is the cost of simulating: loading the model,
preparing a job, importance and selection around the probe, copying and folding updates, writing the round to
disk.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedel.simulation import start
from fedel.simulation.job import SimulationConfig
from fedel.simulation.workers import EvaluationPart, Tally
from fedel.simulation.workload import TorchWorkload
from fedel.strategies.base import WrappedTrainer
from fedel.types import LocalWork, Tensors, Trained, Trainer, TrainSpec, Window


class Spent:
    """CPU seconds by activity."""

    steps = around_steps = probe = tests = 0.0


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


def measure(job: SimulationConfig, rounds: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as place,
        start.session(job, Path(place) / "run", executor="serial", make_workload=TimedWorkload) as session,
    ):
        session.simulation.play()  # the first round warms up
        Spent.steps = Spent.around_steps = Spent.probe = Spent.tests = 0.0
        begin, wall = time.process_time(), time.perf_counter()
        for _ in range(rounds):
            record = session.simulation.play()
            session.folder.commit(session.simulation.checkpoint, record)
        total, wall = time.process_time() - begin, time.perf_counter() - wall
    rest = total - Spent.steps - Spent.around_steps - Spent.probe - Spent.tests
    return {
        "wall_seconds": wall,
        "cpu_seconds": total,
        "steps": Spent.steps,
        "probe": Spent.probe,
        "tests": Spent.tests,
        "around the steps": Spent.around_steps,
        "everything else": rest,
        "overhead": (Spent.around_steps + rest) / (Spent.steps + Spent.probe),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fedel")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--width", type=float)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    workload: dict[str, Any] = {"model": arguments.model, "data": arguments.data}
    if arguments.width:
        workload["model_options"] = {"width": arguments.width}
    job = SimulationConfig.parse(
        {
            "strategy": {"name": arguments.strategy},
            "workload": workload,
            "rounds": {"num_rounds": arguments.rounds + 1, "num_participants": 25, "evaluate_every": 1},
            "work": {"num_steps": arguments.steps, "batch_size": arguments.batch_size},
            "partition": {"num_clients": 100},
            "evaluation": {"limit": 1000},
        }
    )
    found = measure(job, arguments.rounds)
    if arguments.json:
        print(json.dumps(found))
        return
    print(
        f"{arguments.strategy}, {arguments.model} on {arguments.data}: {arguments.rounds} rounds of 25 clients"
    )
    for name in ("steps", "probe", "tests", "around the steps", "everything else"):
        print(f"  {name:18} {found[name]:8.2f} s  {found[name] / found['cpu_seconds']:6.1%}")
    print(f"  {'all':18} {found['cpu_seconds']:8.2f} s   ({found['wall_seconds']:.1f} s wall time)")
    print(f"  overhead {found['overhead']:.1%} of steps and probes")


if __name__ == "__main__":
    main()
