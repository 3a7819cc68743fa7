"""The importance probe against its definition (22.4), and that it leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedel.data.dataset import Dataset
from fedel.models.blocks import BlockModel
from fedel.seeds import generator
from fedel.training.batches import batch_stream
from fedel.types import LocalWork, TimingProfile, Window

from .toys import INDICES, trainer_of


def test_probe_is_the_product_of_the_trial_step_and_the_gradient_after_it(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    start = normed.tensors()
    actual = trainer_of(normed, data, profile).probe(start, Window(2, 3), work, seed=5)

    rng = generator(5, "probe")
    x, y = data.train_batch(next(batch_stream(INDICES, work, rng)), rng)
    h = normed.eval().run(torch.from_numpy(x), 1, 1).detach()
    normed.blocks["two"].train()
    normed.blocks["three"].train()
    normed.requires_grad_(True)
    parts = (normed.blocks["two"], normed.blocks["three"], normed.exits["three"])
    parameters = [p for part in parts for p in part.parameters()]

    def gradients() -> list[torch.Tensor]:
        loss = F.cross_entropy(normed.exit(3, normed.run(h, 2, 3)), torch.from_numpy(y))
        return list(torch.autograd.grad(loss, parameters))

    before = gradients()
    moves = [-work.lr * (g + work.weight_decay * p.detach()) for p, g in zip(parameters, before, strict=True)]
    with torch.no_grad():
        for p, move in zip(parameters, moves, strict=True):
            p.add_(move)
    expected = [float((g * m).sum()) for g, m in zip(gradients(), moves, strict=True)]
    names = [t.name for t in normed.spec.weights_in(2, 3)]
    assert list(actual) == names
    np.testing.assert_allclose(list(actual.values()), expected[: len(names)], rtol=1e-3, atol=1e-7)


def test_probe_restores_weights_and_batch_norm_statistics(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    start = normed.tensors()
    state = {name: value.clone() for name, value in normed.state_dict().items()}
    random = torch.get_rng_state()
    trainer_of(normed, data, profile).probe(start, Window(1, 4), work, seed=5)
    for name, value in normed.state_dict().items():
        assert torch.equal(state[name], value), name
    assert torch.equal(random, torch.get_rng_state())


def test_probe_says_that_a_sensible_step_helps(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    change = trainer_of(normed, data, profile).probe(normed.tensors(), Window(1, 4), work, seed=5)
    assert sum(change.values()) < 0


def test_probe_is_the_same_for_the_same_seed(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    trainer, start = trainer_of(normed, data, profile), normed.tensors()
    first = trainer.probe(start, Window(1, 2), work, seed=5)
    assert first == trainer.probe(start, Window(1, 2), work, seed=5)
    assert first != pytest.approx(trainer.probe(start, Window(1, 2), work, seed=6))
