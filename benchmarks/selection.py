"""Time of tensor selection compared with a training step: 161 tensors of ResNet50, 10,000 bins.

    python -m benchmarks.selection

CPU seconds of one thread, median of several runs; only the ratio matters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from fedel.core import selection
from fedel.models import build
from fedel.training.orin import orin_profile

BATCH, REPEATS = 32, 7


def cpu_seconds(function: Callable[[], object]) -> float:
    """Median CPU seconds of a call."""
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def training_step() -> Callable[[], object]:
    model = build("resnet50", num_classes=35)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(BATCH, 1, 32, 32), torch.randint(0, 35, (BATCH,))
    model.train()

    def step() -> None:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()

    step()
    return step


def main() -> None:
    torch.set_num_threads(1)
    step = cpu_seconds(training_step())
    times = orin_profile(build("resnet50", num_classes=35).spec, "resnet50").tensors
    grads = [t.grad_seconds for t in times]
    updates = [t.update_seconds for t in times]
    importance = np.random.default_rng(0).random(len(times)).tolist()
    total = sum(grads) + sum(updates)
    print(f"one training step of ResNet50, batch {BATCH}: {1000 * step:.0f} ms CPU")
    print(f"{'budget':>8} {'select':>10} {'of a step':>10}")
    for share in (0.1, 0.25, 1 / 3, 0.5, 0.75):
        seconds = cpu_seconds(lambda share=share: selection.select(grads, updates, importance, share * total))
        print(f"{share:8.0%} {1000 * seconds:7.1f} ms {seconds / step:10.2%}")


if __name__ == "__main__":
    main()
