"""Tests of a model on the workers, in parts that do not depend on their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedel.simulation.executors import Executor
from fedel.simulation.workers import EvaluationPart, Tally

NUM_TEST_PARTS = 8
"""A test is cut into this many parts, whatever the number of workers, so that sums are always rounded alike."""


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float

    @staticmethod
    def of(tallies: Sequence[Tally]) -> Score:
        targets = max(1, sum(tally.num_targets for tally in tallies))
        correct = sum(tally.num_correct for tally in tallies)
        return Score(correct / targets, math.fsum(tally.loss_sum for tally in tallies) / targets)


def scores(
    executor: Executor,
    num_samples: int,
    limit: int,
    average: tuple[int, ...] = (),
    each_exit: bool = False,
) -> list[Score]:
    """Of the mean of the exits in ``average`` (empty: the last exit), or of each exit by itself.

    ``num_samples`` are there, of which at most ``limit`` are used; 0 takes all.
    """
    num_parts = min(NUM_TEST_PARTS, limit or num_samples, num_samples)
    todo = [EvaluationPart(part, num_parts, limit, average, each_exit) for part in range(num_parts)]
    parts: dict[int, Sequence[Tally]] = dict(executor.run(todo))
    return [Score.of(tallies) for tallies in zip(*(parts[i] for i in range(num_parts)), strict=True)]
