"""What elastic training saves, and how well a timing profile predicts it. Prints Markdown.

    python benchmarks/elastic_step.py accuracy --model vgg16 --width 0.25
    python benchmarks/elastic_step.py saving --model resnet50
    python benchmarks/elastic_step.py bytes --model resnet50 --width 0.5 --batch-size 64

``accuracy`` trains random tensors of random windows between the rounds of the profiler, so that both see the
same machine. ``saving`` trains whole windows: in turns to measure the time, and each in a new process to
measure the memory. In that process freed memory goes back to the system at once, so the peak is what was in
use. ``bytes`` compares the memory that a profile predicts for random windows with what torch's allocator gave
out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedel.core.memory_budget import VALUE_BYTES, probe_bytes, step_bytes
from fedel.core.timing import step_cost
from fedel.data.dataset import Dataset, Split
from fedel.data.transforms import Images
from fedel.models.blocks import BlockModel
from fedel.models.registry import build
from fedel.training import memory_use
from fedel.training.profiler import profile
from fedel.training.trainer import TorchTrainer
from fedel.types import LocalWork, TimingProfile, TrainSpec, Window

CHANNELS = {"vgg16": 3, "resnet50": 1}
NOTHING = TimingProfile("", "", 0, (), ())
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Makes glibc return freed memory at once."""


def noise(model: BlockModel, channels: int, num_samples: int) -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (num_samples, channels, 32, 32), dtype=np.uint8)
    split = Split(x, rng.integers(0, model.num_classes, num_samples))
    return Dataset("noise", "image", split, split, tuple(map(str, range(model.num_classes))), Images())


def set_up(args: argparse.Namespace) -> tuple[BlockModel, TorchTrainer, LocalWork]:
    torch.manual_seed(0)
    model = build(args.model, width=args.width)
    work = LocalWork(num_steps=args.steps, batch_size=args.batch_size, lr=1e-4)
    data = noise(model, CHANNELS[args.model], 4 * args.batch_size)
    return model, TorchTrainer(model, data, np.arange(len(data.train)), NOTHING), work


def random_jobs(model: BlockModel, work: LocalWork, number: int) -> list[TrainSpec]:
    rng = np.random.default_rng(1)
    jobs = []
    for _ in range(number):
        end = int(rng.integers(1, model.spec.num_blocks + 1))
        front = int(rng.integers(end, model.spec.num_blocks + 1))
        names = [t.name for t in model.spec.weights_in(end, front)]
        selected = frozenset(rng.choice(names, rng.integers(1, len(names) + 1), replace=False).tolist())
        jobs.append(TrainSpec(work, work.num_steps, 0, selected, (front,), end))
    return jobs


def accuracy(args: argparse.Namespace) -> None:
    """Predicted and measured seconds of a step."""
    model, trainer, work = set_up(args)
    jobs, start = random_jobs(model, work, args.windows), model.tensors()
    measured: list[list[float]] = [[] for _ in jobs]

    def train_between_rounds(_done: int, _total: int) -> None:
        for job, seconds in zip(jobs, measured, strict=True):
            seconds.append(trainer.train(start, job).seconds / work.num_steps)

    rows = np.arange(args.batch_size)
    batch = trainer.data.train_batch(rows)
    fetch = lambda: trainer.data.train_batch(rows)  # noqa: E731
    found = profile(model, batch, work, rounds=args.rounds, fetch=fetch, progress=train_between_rounds)
    print("| window | tensors | predicted ms | measured ms | error |\n|---|---|---|---|---|")
    errors = []
    for job, seconds in zip(jobs, measured, strict=True):
        predicted = step_cost(found, job.selected, job.exits, job.end).total("train")
        actual = statistics.median(seconds)
        errors.append(predicted / actual - 1)
        total = len(model.spec.weights_in(job.end, job.exits[0]))
        print(
            f"| {job.end}-{job.exits[0]} | {len(job.selected)} of {total} | {predicted * 1e3:.1f} "
            f"| {actual * 1e3:.1f} | {errors[-1]:+.1%} |"
        )
    size = np.abs(errors)
    print(f"\n{args.windows} windows: median error {np.median(size):.1%}, worst {size.max():.1%};")
    print(f"calibration {found.calibration:.3f}, {args.rounds} rounds.")


def predicted_bytes(args: argparse.Namespace) -> None:
    """Predicted and measured bytes of training and of the importance probe, without the model."""
    model, trainer, work = set_up(args)
    start, device = model.tensors(), torch.device("cpu")
    x, y = map(torch.from_numpy, trainer.data.train_batch(np.arange(args.batch_size)))
    use = memory_use.measure(model, x, y, work, device)
    fixed = use.base_bytes + sum(t.size for t in model.spec.tensors) * VALUE_BYTES
    found: dict[str, list[float]] = {"training": [], "probe": []}
    for job in random_jobs(model, work, args.windows):
        window = Window(job.end, job.exits[0])
        _, trained = memory_use.peak_of(partial(trainer.train, start, job), device)
        _, probed = memory_use.peak_of(partial(trainer.probe, start, window, work, 0), device)
        found["training"].append((step_bytes(model.spec, use, job.selected, window) - fixed) / trained)
        found["probe"].append((probe_bytes(model.spec, use, window) - fixed) / probed)
    print("| predicted over measured | least | median | most |\n|---|---|---|---|")
    for name, shares in found.items():
        print(f"| {name} | {min(shares):.2f} | {statistics.median(shares):.2f} | {max(shares):.2f} |")


def windows_of(model: BlockModel) -> dict[str, tuple[int, int]]:
    """The whole model, and its first, middle and last third of blocks."""
    last = model.spec.num_blocks
    third = round(last / 3)
    return {
        "whole model": (1, last),
        "first third": (1, third),
        "middle third": (third + 1, last - third),
        "last third": (last - third + 1, last),
    }


def window_job(model: BlockModel, work: LocalWork, end: int, front: int) -> TrainSpec:
    selected = frozenset(t.name for t in model.spec.weights_in(end, front))
    return TrainSpec(work, work.num_steps, 0, selected, (front,), end)


def saving(args: argparse.Namespace) -> None:
    """Seconds and memory of a step for windows along the network, compared with training everything."""
    model, trainer, work = set_up(args)
    windows, start = windows_of(model), model.tensors()
    taken: dict[str, list[float]] = {name: [] for name in windows}
    for _ in range(args.rounds):
        for name, window in windows.items():
            taken[name].append(trainer.train(start, window_job(model, work, *window)).seconds / work.num_steps)
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    peaks = {name: peak_of_window(*window) for name, window in windows.items()}
    print("| trained | blocks | ms per step | share | training memory MB | share |\n|---|---|---|---|---|---|")
    for name, (end, front) in windows.items():
        time, peak = seconds[name], peaks[name]
        print(
            f"| {name} | {end}-{front} | {time * 1e3:.0f} | {time / seconds['whole model']:.2f} "
            f"| {peak / 1e6:.0f} | {peak / peaks['whole model']:.2f} |"
        )


def peak_of_window(end: int, front: int) -> int:
    command = [sys.executable, __file__, "memory", *sys.argv[2:], "--blocks", f"{end}-{front}"]
    environment = {**os.environ, **GIVE_BACK}
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


def memory(args: argparse.Namespace) -> None:
    """The peak memory that training one window adds, in this process."""
    model, trainer, work = set_up(args)
    end, front = map(int, args.blocks.split("-"))
    start = model.tensors()
    warm_up()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print(trainer.train(start, window_job(model, work, end, front)).peak_memory_bytes - before)


def warm_up() -> None:
    """Let libraries load and compile what they need, so that it does not count as memory of training."""
    layers = [torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    small = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(72, 2))
    small(torch.randn(2, 1, 8, 8)).sum().backward()
    torch.optim.SGD(small.parameters(), momentum=0.9, fused=True).step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "saving", "bytes", "memory"))
    parser.add_argument("--model", default="vgg16", choices=sorted(CHANNELS))
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--blocks", default="1-1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    commands = {"accuracy": accuracy, "saving": saving, "bytes": predicted_bytes, "memory": memory}
    commands[args.what](args)


if __name__ == "__main__":
    main()
