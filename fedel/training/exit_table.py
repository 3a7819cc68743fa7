"""What every exit of a trained model costs and is worth: each is a smaller model to deploy."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fedel.data.dataset import Dataset
from fedel.errors import ConfigError
from fedel.files import write_atomic
from fedel.models.deploy import TrainedModel, load
from fedel.records import ExitRow, ExitTable
from fedel.training.evaluate import evaluate, evaluate_exits
from fedel.training.factory import make_data

NUM_REPEATS = 30
MAX_SECONDS = 20.0
"""Of all repeats together; at least three are made."""


def measured(directory: str | Path, round: str = "best", batch_size: int = 1) -> ExitTable:
    """The exits of a run's model, measured here and now; kept in its directory, where the report finds them."""
    if batch_size < 1:
        raise ConfigError(f"--batch {batch_size}: at least one sample per call")
    model = load(directory, round)
    data = make_data(model.job)
    rows = exit_table(model, data, batch_size)
    found = ExitTable(model.round, batch_size, platform.node() or "this machine", tuple(rows))
    if len(together := model.exits(None)) > 1:
        with _one_thread():
            score = evaluate(model.network, data.test_batches(), average=together)
        found = replace(found, together=together, together_accuracy=score.accuracy)
    with suppress(OSError):  # the directory may be somebody else's
        write_atomic(model.run.path / "exits.json", found.to_json())
    return found


def exit_table(model: TrainedModel, data: Dataset, batch_size: int = 1) -> list[ExitRow]:
    """One row per exit."""
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
