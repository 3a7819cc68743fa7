"""Scores by hand: whole network, exits, ensemble; text targets that do not count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedel.data.dataset import Dataset
from fedel.models.blocks import BlockModel
from fedel.training.evaluate import Score, evaluate, evaluate_exits


def whole_set(data: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    ((x, y),) = data.test_batches(len(data.test))
    return torch.from_numpy(x), torch.from_numpy(y)


def score_of(logits: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    return float((logits.argmax(1) == y).double().mean()), float(F.cross_entropy(logits.double(), y))


def test_the_network_is_scored_over_uneven_batches_and_not_changed(normed: BlockModel, data: Dataset) -> None:
    before = normed.train().tensors()
    score = evaluate(normed, data.test_batches(25))
    x, y = whole_set(data)
    with torch.no_grad():
        expected = score_of(normed.eval()(x), y)
    assert (score.accuracy, score.loss) == pytest.approx(expected, rel=1e-5)
    assert score.num_targets == len(data.test)
    assert all(np.array_equal(before[n], v) for n, v in normed.tensors().items())


def test_every_exit_and_their_ensemble(plain: BlockModel, data: Dataset) -> None:
    x, y = whole_set(data)
    with torch.no_grad():
        logits = plain.eval().all_exits(x)
    exits = evaluate_exits(plain, data.test_batches(40))
    for score, z in zip(exits, logits, strict=True):
        assert (score.accuracy, score.loss) == pytest.approx(score_of(z, y), rel=1e-5)
    assert exits[-1].loss == pytest.approx(evaluate(plain, data.test_batches(40)).loss)
    together = evaluate(plain, data.test_batches(40), average=range(1, len(logits) + 1))
    assert together.loss == pytest.approx(score_of(torch.stack(logits).mean(0), y)[1], rel=1e-5)
    some = evaluate(plain, data.test_batches(40), average=(2, 4))
    assert some.loss == pytest.approx(score_of((logits[1] + logits[3]) / 2, y)[1], rel=1e-5)


def test_perplexity_counts_masked_tokens_only(plain: BlockModel) -> None:
    class Uniform(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*x.shape, 5)

    y = np.array([[-100, 0, -100], [1, -100, -100]])
    score = evaluate(Uniform(), [(np.zeros((2, 3), np.int64), y)])  # type: ignore[arg-type]
    assert score.perplexity == pytest.approx(5)
    assert (score.num_targets, score.accuracy) == (2, 0.5)
    assert Score(0.0, 1e4, 1).perplexity == math.inf
