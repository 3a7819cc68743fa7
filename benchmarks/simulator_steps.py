"""Client-steps that a simulation makes in a second of CPU time, before and after a change. Prints Markdown.

    python -m benchmarks.simulator_steps --before main
    python -m benchmarks.simulator_steps --cases cnn --rounds 12

A task is what a worker does for five clients: load the model, train 20 steps each, copy what was trained; for
FedEL's window also the importance probe, and half of the window's tensors are selected, others for each client.
Every way to compute has a process of its own. They take turns, one task each, so that all see the same machine,
and the best task of each counts. ``--before`` names a commit whose code comes first; the others are ``exact``
and ``fast`` of the code as it is here.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedel.data.dataset import Dataset, Split, Transform
from fedel.data.transforms import Images, MaskedTokens
from fedel.models.registry import build
from fedel.simulation.workload import TorchWorkload
from fedel.types import LocalWork, TimingProfile, TrainSpec, Window

NUM_STEPS = 20
CLIENTS = tuple("abcde")
NOTHING = TimingProfile("", "", 0, (), ())
SGD = LocalWork(num_steps=NUM_STEPS, batch_size=16, lr=0.02, momentum=0.9, weight_decay=5e-4)
ADAMW = LocalWork(num_steps=NUM_STEPS, batch_size=8, lr=2e-3, weight_decay=1e-2, optimiser="adamw")
SMALL_ALBERT = {
    "mode": "unshared", "vocab_size": 2000, "hidden_size": 64, "embedding_size": 32, "num_layers": 4,
    "num_heads": 4, "ffn_size": 128, "bottleneck": 32, "max_length": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    model: str
    options: dict[str, object]
    shape: tuple[int, ...]
    """Of one sample."""
    work: LocalWork = SGD


NARROW = {"width": 0.125, "batch_norm": True}
CASES = {
    "vgg16-16px": Case("vgg16", NARROW, (3, 16, 16)),
    "vgg16-32px": Case("vgg16", NARROW, (3, 32, 32)),
    "cnn": Case("cnn", {"width": 0.5, "batch_norm": True}, (1, 14, 14)),
    "albert": Case("albert", SMALL_ALBERT, (16,), ADAMW),
}


def noise(case: Case, num_classes: int, num_samples: int = 300) -> Dataset:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, num_classes, num_samples)
    transform: Transform
    if len(case.shape) == 1:
        x, labels = (rng.integers(5, num_classes, (num_samples, *case.shape)) for _ in range(2))
        transform = MaskedTokens(num_classes, 4, tuple(range(5)))
        kind = "text"
    else:
        x = rng.integers(0, 256, (num_samples, *case.shape), dtype=np.uint8)
        transform, kind = Images((0.5,) * case.shape[0], (0.25,) * case.shape[0]), "image"
    split = Split(x, labels)
    return Dataset("noise", kind, split, split, tuple(map(str, range(num_classes))), transform)  # type: ignore[arg-type]


def tasks(case: Case, compute: str) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    model = build(case.model, **case.options)
    data = noise(case, model.num_classes)
    parts = dict(zip(CLIENTS, np.array_split(np.arange(len(data.train)), len(CLIENTS)), strict=True))
    known = inspect.signature(TorchWorkload).parameters
    how = {"compute": compute} if "compute" in known else {}
    workload = TorchWorkload(model, data, parts, dict.fromkeys(CLIENTS, NOTHING), **how)  # type: ignore[arg-type]
    start, spec, work = model.tensors(), model.spec, case.work
    last = spec.num_blocks
    window = Window(1 + last // 3, 2 * last // 3)
    everything = [t.name for t in spec.weights_in(1, last)]
    names = [t.name for t in spec.weights_in(window.end, window.front)]
    rng = np.random.default_rng(1)
    halves = [rng.choice(names, len(names) // 2, replace=False).tolist() for _ in CLIENTS]

    def train(selected: list[list[str]], exits: tuple[int, ...], end: int) -> None:
        specs = [TrainSpec(work, NUM_STEPS, k, frozenset(each), exits, end) for k, each in enumerate(selected)]
        trainers = [workload.trainer(client) for client in CLIENTS]
        if compute == "fast":
            from fedel.simulation.together import Wanted

            workload.train_all([Wanted(t, start, s) for t, s in zip(trainers, specs, strict=True)])
        else:
            for trainer, train_spec in zip(trainers, specs, strict=True):
                trainer.train(start, train_spec)

    def fedel() -> None:
        for client in CLIENTS:
            workload.trainer(client).probe(start, window, work, 0)
        train(halves, (window.front,), window.end)

    return {
        "all tensors": lambda: train([everything] * len(CLIENTS), (last,), 1),
        f"window {window.end}-{window.front}": fedel,
    }


def serve(compute: str) -> None:
    """Make the task that a line of the input names, and answer with its seconds of CPU time."""
    torch.set_num_threads(1)
    ready: dict[str, list[tuple[str, Callable[[], object]]]] = {}
    for line in sys.stdin:
        case, place = line.split()
        if case not in ready:
            ready[case] = list(tasks(CASES[case], compute).items())
            for _, task in ready[case]:
                task()  # warm up
        name, task = ready[case][int(place)]
        begin = time.process_time()
        task()
        print(time.process_time() - begin, name, flush=True)


class Way:
    """A process that computes in one way."""

    def __init__(self, name: str, compute: str, code: Path | None = None) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(code)} if code else {})}
        command = [sys.executable, __file__, "--serve", compute]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def task(self, case: str, place: int) -> tuple[float, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{case} {place}\n")
        self._process.stdin.flush()
        seconds, _, name = self._process.stdout.readline().strip().partition(" ")
        return float(seconds), name

    def close(self) -> None:
        self._process.communicate()


def code_of(commit: str, folder: Path) -> Path:
    """The package as it was at a commit."""
    archive = folder / "code.tar"
    root = Path(__file__).parents[1]
    subprocess.run(["git", "-C", str(root), "archive", "-o", str(archive), commit, "fedel"], check=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="", metavar="COMMIT")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    with tempfile.TemporaryDirectory() as folder:
        ways = [Way("before", "exact", code_of(args.before, Path(folder)))] if args.before else []
        ways += [Way(compute, compute) for compute in ("exact", "fast")]
        columns = [way.name for way in ways]
        print(
            f"| network | trained | {' | '.join(columns)} | {' | '.join(f'{c}, ratio' for c in columns[1:])} |"
        )
        print("|---" * (2 * len(columns) + 1) + "|")
        for case in args.cases:
            for place in range(2):
                taken: dict[str, list[float]] = {way.name: [] for way in ways}
                for _ in range(args.rounds):
                    for way in ways:
                        seconds, name = way.task(case, place)
                        taken[way.name].append(seconds)
                rates = [len(CLIENTS) * NUM_STEPS / min(taken[column]) for column in columns]
                ratios = [f"{rate / rates[0]:.2f}" for rate in rates[1:]]
                cells = [case, name, *(f"{rate:.0f}" for rate in rates), *ratios]
                print(f"| {' | '.join(cells)} |", flush=True)
        for way in ways:
            way.close()
    return None


if __name__ == "__main__":
    main()
