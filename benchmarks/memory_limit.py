"""A client held to a share of FedAvg's memory by the kernel: with the memory budget it trains, without it dies.

    python -m benchmarks.memory_limit --share 0.4

Each line is a process of its own that plays one client for some rounds. FedAvg's peak without a limit is
measured first: all memory of the process (VmHWM), so Python, torch, the data and the model count too. The limit
is a share of that, and the kernel keeps it (RLIMIT_DATA): what the process allocates, and the library pages
it has loaded by then, together stay below the limit; an allocation beyond it fails. That counts what torch's
libraries reserve and never touch, too, so the budget is set lower by ``--reserved-mb``. The client with the
budget also measures its profile under the limit. T_th is so high that memory alone decides what is trained.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.elastic_step import CHANNELS, GIVE_BACK, warm_up
from fedel.data.dataset import Dataset, Split
from fedel.data.transforms import Images
from fedel.models.blocks import BlockModel
from fedel.models.registry import build
from fedel.roles.edge import KeptMemories, recall, run_task
from fedel.strategies import FedAvg, FedEL
from fedel.training.profiler import profile
from fedel.training.trainer import TorchTrainer
from fedel.types import (
    BlockTime,
    LocalWork,
    Memory,
    Task,
    Tensors,
    TensorTime,
    TimingProfile,
    Trained,
    TrainSpec,
    Window,
)

NO_LIMIT_SECONDS = 1e6


def noise(model: BlockModel, args: argparse.Namespace) -> Dataset:
    rng = np.random.default_rng(0)
    shape = (2 * args.batch_size, CHANNELS[args.model], args.pixels, args.pixels)
    split = Split(rng.integers(0, 256, shape, dtype=np.uint8), rng.integers(0, model.num_classes, shape[0]))
    return Dataset("noise", "image", split, split, tuple(map(str, range(model.num_classes))), Images())


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Watched(TorchTrainer):
    """Notes the peak of each phase; a training starts the system's high-water mark again."""

    peaks: ClassVar[list[int]] = []

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        found = super().probe(model, window, work, seed)
        self.peaks.append(status("VmHWM"))
        return found

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        self.peaks.append(status("VmHWM"))
        trained = super().train(model, train_spec)
        self.peaks.append(status("VmHWM"))
        return trained


def client(args: argparse.Namespace) -> dict[str, Any]:
    """Play one client, here; what it trained, and its peak."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warm_up()
    if args.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (args.limit - status("RssFile"),) * 2)
    model = build(args.model, width=args.width)
    data = noise(model, args)
    work = LocalWork(num_steps=2, batch_size=args.batch_size, lr=1e-3)
    budget = args.limit - args.reserved_mb * 10**6 if args.client == "budget" else 0
    timing = unmeasured(model)
    if budget:
        batch = data.train_batch(np.arange(args.batch_size))
        timing = profile(model, batch, work, rounds=1, limit_bytes=budget)
    trainer = Watched(model, data, np.arange(len(data.train)), timing)
    strategy = FedAvg() if args.client == "fedavg" else FedEL()
    memories, start, windows = KeptMemories(), model.tensors(), []
    for number in range(args.rounds):
        task = Task(number, "a", NO_LIMIT_SECONDS, work, seed=number, memory_bytes=budget)
        memory = recall(number - 1, Memory(), memories)
        report = run_task(strategy, task, memory, start, trainer, memories).report
        windows.append(
            (report.window.end, report.window.front, len(report.selected)) if report.window else None
        )
    return {"windows": windows, "peak": max(trainer.peaks)}


def unmeasured(model: BlockModel) -> TimingProfile:
    times = tuple(TensorTime(t.name, t.block, 1.0, 1.0) for t in model.spec.weights)
    return TimingProfile("", model.spec.name, 1, times, (BlockTime(1.0),) * model.spec.num_blocks)


def in_a_process(name: str, limit: int, rounds: int) -> tuple[dict[str, Any], str]:
    options = ["--client", name, "--limit", str(limit), "--rounds", str(rounds)]
    command = [sys.executable, "-m", "benchmarks.memory_limit", *sys.argv[1:], *options]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **GIVE_BACK, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), ""
    return {}, (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]


def compare(args: argparse.Namespace) -> dict[str, tuple[dict[str, Any], str]]:
    found = {"FedAvg, no limit": in_a_process("fedavg", 0, 1)}
    peak = found["FedAvg, no limit"][0]["peak"]
    limit = int(peak * args.share)
    found["FedAvg"] = in_a_process("fedavg", limit, 1)
    found["FedEL, no memory budget"] = in_a_process("fedel", limit, 1)
    found["FedEL, memory budget"] = in_a_process("budget", limit, args.rounds)
    print(
        f"{args.model}, width {args.width:g}, {args.pixels} x {args.pixels}, batch {args.batch_size}; ", end=""
    )
    print(f"limit {limit / 1e6:.0f} MB, {args.share:.0%} of FedAvg's peak; ", end="")
    print(f"budget {limit / 1e6 - args.reserved_mb:.0f} MB\n")
    print("| client | outcome | peak MB | share of FedAvg's | windows (tensors) |\n|---|---|---|---|---|")
    for name, (result, error) in found.items():
        if error:
            print(f"| {name} | dies: {error[:90]} | | | |")
            continue
        windows = ", ".join(f"{w[0]}-{w[1]} ({w[2]})" for w in result["windows"] if w)
        share = f"{result['peak'] / peak:.0%}"
        print(f"| {name} | trains to the end | {result['peak'] / 1e6:.0f} | {share} | {windows} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", choices=sorted(CHANNELS))
    parser.add_argument("--width", type=float, default=0.5)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--reserved-mb", type=int, default=120)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument(
        "--client", default="", choices=("", "fedavg", "fedel", "budget"), help=argparse.SUPPRESS
    )
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(client(args)))
    else:
        compare(args)


if __name__ == "__main__":
    main()
