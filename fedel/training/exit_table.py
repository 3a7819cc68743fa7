"""What every exit of a trained model costs and is worth: each is a smaller model to deploy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fedel.data.dataset import Dataset
from fedel.models.deploy import TrainedModel
from fedel.training.evaluate import evaluate_exits

NUM_REPEATS = 30
MAX_SECONDS = 20.0
"""Of all repeats together; at least three are made."""


@dataclass(frozen=True)
class ExitRow:
    """One exit: the network up to its block, and its head."""

    exit: int
    block: str
    accuracy: float
    """On the test data."""
    num_parameters: int
    num_bytes: int
    """Of parameters and statistics."""
    ms_per_sample: float
    """Median of repeats on one thread of this machine's processor."""


def exit_table(model: TrainedModel, data: Dataset, batch_size: int = 1) -> list[ExitRow]:
    """Measured here and now."""
    network = model.network
    exits = range(1, network.spec.num_blocks + 1)
    modules = [model.module(exit) for exit in exits]
    with _one_thread():
        scores = evaluate_exits(network, data.test_batches())
        seconds = _seconds(modules, torch.from_numpy(model.takes.samples(batch_size)))
    return [
        ExitRow(
            exit,
            network.block_names[exit - 1],
            score.accuracy,
            sum(p.numel() for p in module.parameters()),
            sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers())),
            1000 * spent / batch_size,
        )
        for exit, module, score, spent in zip(exits, modules, scores, seconds, strict=True)
    ]


def _seconds(modules: Sequence[nn.Module], x: torch.Tensor) -> list[float]:
    """The median of a call of each; they take turns, so that a busy moment meets all of them."""
    spent: list[list[float]] = [[] for _ in modules]
    begin = time.perf_counter()
    with torch.inference_mode():
        for module in modules:
            module(x)  # the first call sets up
        while len(spent[-1]) < 3 or (
            len(spent[-1]) < NUM_REPEATS and time.perf_counter() - begin < MAX_SECONDS
        ):
            for module, times in zip(modules, spent, strict=True):
                start = time.perf_counter()
                module(x)
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in spent]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
