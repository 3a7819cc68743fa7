"""Peak memory of a training step, measured on this machine for windows and selections that a run used.

A separate process in which freed memory goes back to the system at once, so that the peak is what was in use.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedel.errors import ServiceError
from fedel.experiments.outcomes import Outcome
from fedel.files import write_atomic

MOST_USED = 4
"""How many windows with their selections are measured per device type; a run can have hundreds."""
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
_START = "import sys; sys.path[:] = filter(None, sys.path); from fedel.experiments.memory import main; main()"
"""Removes the working directory, which ``-c`` puts first; it is searched last, as in this process."""
NUM_STEPS = 2
"""The second step includes the state of the optimiser."""


@dataclass(frozen=True)
class Step:
    """What is trained in a step; an empty window means the whole model."""

    window: tuple[int, ...]
    selected: tuple[str, ...]


@dataclass(frozen=True)
class Used:
    """A step of a method on a device type, and the number of rounds in which it was used."""

    method: str
    device: str
    step: Step
    rounds: int
    peak_bytes: int = 0


def used_steps(outcome: Outcome) -> list[Used]:
    """The steps that each device type used most often."""
    counts: dict[str, Counter[Step]] = {}
    for record in outcome.report.rounds:
        for entry in record.clients:
            step = Step(entry.window or (), entry.selected)
            counts.setdefault(entry.device_type, Counter())[step] += 1
    return [
        Used(outcome.plan.label, device, step, rounds)
        for device, steps in sorted(counts.items())
        for step, rounds in steps.most_common(MOST_USED)
    ]


def measured(used: Sequence[Used], job: Mapping[str, Any], folder: Path) -> list[Used]:
    """The steps with their peaks. All are measured in one process, once, and then stored in ``folder``.

    ``job`` is the job of a simulation; its model, data and local work are used. It may be larger than the run.
    """
    steps = list(dict.fromkeys(u.step for u in used))
    workload = {key: job[key] for key in ("workload", "work", "seed")}
    question = json.dumps({"job": workload, "steps": [asdict(step) for step in steps]})
    kept = folder / f"memory-{hashlib.sha256(question.encode()).hexdigest()[:8]}.json"
    if not kept.exists():
        write_atomic(kept, json.dumps(_ask(question)))
    peaks = dict(zip(steps, json.loads(kept.read_text(encoding="utf-8")), strict=True))
    return [replace(u, peak_bytes=peaks[u.step]) for u in used]


def mean_peak(used: Sequence[Used]) -> float:
    return sum(u.rounds * u.peak_bytes for u in used) / sum(u.rounds for u in used)


def _ask(question: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", _START],
        input=question,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **_GIVE_BACK, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode:
        raise ServiceError(
            f"measuring memory failed:\n{done.stderr.strip()}\nRun the experiment without `resources`"
        )
    peaks: list[int] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def main() -> None:
    import torch

    from fedel.simulation.job import SimulationConfig
    from fedel.training.factory import fresh_model, make_data
    from fedel.training.trainer import TorchTrainer
    from fedel.types import TimingProfile, TrainSpec

    question = json.load(sys.stdin)
    torch.set_num_threads(1)
    run = SimulationConfig.parse(question["job"]).run
    data = make_data(run)
    model = fresh_model(run, data)
    spec, start = model.spec, model.tensors()
    weights = sum(values.nbytes for values in start.values())
    rows = np.arange(min(len(data.train), 2 * run.work.batch_size))
    trainer = TorchTrainer(model, data, rows, TimingProfile("", "", 0, (), ()))

    def peak_bytes(window: Sequence[int], selected: Sequence[str]) -> int:
        end, front = window or (1, spec.num_blocks)
        work = replace(run.work, num_steps=NUM_STEPS)
        exits = spec.exits_for(end, front)
        training = TrainSpec(work, NUM_STEPS, 0, frozenset(selected), exits, end)
        before = _resident_bytes()
        return trainer.train(start, training).peak_memory_bytes - before + weights

    # The first step does not count: libraries load and compile what they need.
    peak_bytes((), [t.name for t in spec.weights])
    print(json.dumps([peak_bytes(**step) for step in question["steps"]]))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
