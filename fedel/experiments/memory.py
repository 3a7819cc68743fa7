"""Peak memory of a training step, measured on this machine for windows and selections that a run used.

A process of its own, in which freed memory goes back to the system at once, so that a peak is what was in use.
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
"""Windows with their selections that are measured for each device type; there may be hundreds."""
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
_START = "import sys; sys.path[:] = filter(None, sys.path); from fedel.experiments.memory import main; main()"
"""Removes the working directory, which ``-c`` puts first; it is searched last, as in this process."""
NUM_STEPS = 2
"""The second has the optimiser's state."""


@dataclass(frozen=True)
class Step:
    """What is trained in a step, through the whole model where the window is empty."""

    window: tuple[int, ...]
    selected: tuple[str, ...]


@dataclass(frozen=True)
class Used:
    """A step of a method on a device type, and in how many of its rounds it was taken."""

    method: str
    device: str
    step: Step
    rounds: int
    peak_bytes: int = 0


def used_steps(outcome: Outcome) -> list[Used]:
    """The steps that each device type took most often."""
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
    """The steps with their peaks, all of them measured in one process; once, and then kept in ``folder``.

    ``job`` is a simulation's: its model, data and local work count. It may be larger than one that was run.
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
        raise ServiceError(f"measuring memory failed:\n{done.stderr.strip()}\nRun the experiment without it")
    peaks: list[int] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def main() -> None:
    import torch

    from fedel.simulation.job import Job
    from fedel.training.factory import fresh_model, make_data
    from fedel.training.trainer import TorchTrainer
    from fedel.types import TimingProfile, TrainSpec

    question = json.load(sys.stdin)
    torch.set_num_threads(1)
    run = Job.parse(question["job"]).run
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

    peak_bytes((), [t.name for t in spec.weights])  # libraries load and compile what they need
    print(json.dumps([peak_bytes(**step) for step in question["steps"]]))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
