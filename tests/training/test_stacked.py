"""Clients that train side by side get what they get alone, up to rounding."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedel.data.dataset import Dataset, Split
from fedel.data.transforms import Images
from fedel.models.registry import build
from fedel.training.stacked import Request, kind, train_together
from fedel.training.trainer import TorchTrainer
from fedel.types import LocalWork, TimingProfile, TrainSpec

NOTHING = TimingProfile("", "", 0, (), ())
WORK = LocalWork(num_steps=4, batch_size=8, lr=0.02, momentum=0.9, weight_decay=5e-4)


@pytest.fixture
def trainers():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    split = Split(rng.integers(0, 256, (60, 1, 8, 8), dtype=np.uint8), rng.integers(0, 10, 60))
    data = Dataset("noise", "image", split, split, tuple("0123456789"), Images((0.5,), (0.25,)))
    model = build("cnn", width=0.5, batch_norm=True)
    return [TorchTrainer(model, data, np.arange(20 * k, 20 * k + 20), NOTHING) for k in range(3)]


def requests(trainers, exits, end, **how):
    """Every client selects other tensors and makes another number of steps."""
    model = trainers[0].model.tensors()
    names = [t.name for t in trainers[0].spec.weights_in(end, max(exits))]
    return [
        Request(t, model, TrainSpec(WORK, 4 + k, k, frozenset(names[k % 2 :: k + 1]), exits, end, **how))
        for k, t in enumerate(trainers)
    ]


@pytest.mark.parametrize(
    ("exits", "end", "optimiser", "detached"),
    [
        ((7,), 1, "sgd", False),
        ((4,), 2, "sgd", False),
        ((3, 6), 3, "sgd", False),
        ((3, 6), 3, "sgd", True),
        ((2, 7), 1, "adamw", False),
    ],
)
def test_side_by_side_is_as_alone(trainers, exits, end, optimiser, detached):
    work = replace(WORK, optimiser=optimiser, lr=0.02 if optimiser == "sgd" else 1e-4)
    asked = requests(trainers, exits, end, detached=detached)
    asked = [replace(r, train_spec=replace(r.train_spec, work=work)) for r in asked]
    assert {kind(asked[0])} == {kind(request) for request in asked} != {None}
    for request, together in zip(asked, train_together(asked), strict=True):
        alone = request.trainer.train(request.model, request.train_spec)
        assert alone.patches.keys() == together.patches.keys()
        assert (alone.num_steps, alone.effective_steps) == (together.num_steps, together.effective_steps)
        assert (alone.loss, alone.loss_square) == pytest.approx((together.loss, together.loss_square), rel=1e-3)
        for name, patch in alone.patches.items():
            assert together.patches[name].values.flags.c_contiguous
            if not name.endswith("conv.bias"):  # before batch norm its gradient is rounding only
                moved = np.abs(patch.values - request.model[name]).max()
                assert np.abs(patch.values - together.patches[name].values).max() < 0.01 * moved, name


def test_a_short_last_step_is_made_of_its_few_samples(trainers):
    asked = requests(trainers, (7,), 1, last_share=0.5)
    for request, together in zip(asked, train_together(asked), strict=True):
        alone = request.trainer.train(request.model, request.train_spec)
        assert 0.5 == alone.last_share == together.last_share
        name = "blocks.classifier.linear.bias"
        if name in alone.patches:
            moved = np.abs(alone.patches[name].values - request.model[name]).max()
            difference = np.abs(alone.patches[name].values - together.patches[name].values).max()
            assert difference < 0.02 * moved


def test_what_changes_the_training_is_done_alone(trainers):
    plain = requests(trainers, (4,), 2)[0]
    assert kind(plain) is not None
    for how in ({"static_norm": True}, {"width": 0.5}, {"prefix_cache_bytes": 1}, {"hooks": (object(),)}):
        assert kind(replace(plain, train_spec=replace(plain.train_spec, **how))) is None
    for work in (replace(WORK, clip_norm=1.0), replace(WORK, num_steps=0, num_epochs=1)):
        assert kind(replace(plain, train_spec=replace(plain.train_spec, work=work))) is None
    other_model = {name: values.copy() for name, values in plain.model.items()}
    assert kind(replace(plain, model=other_model)) != kind(plain)


def test_the_model_keeps_no_trace(trainers):
    """A training after it has the same bits as one before it."""
    asked = requests(trainers, (7,), 1)
    before = trainers[0].train(asked[0].model, asked[0].train_spec)
    train_together(asked)
    after = trainers[0].train(asked[0].model, asked[0].train_spec)
    for name, patch in before.patches.items():
        assert patch.values.tobytes() == after.patches[name].values.tobytes()
