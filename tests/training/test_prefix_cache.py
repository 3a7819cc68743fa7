"""Outputs of the frozen blocks, kept for samples that come again: the same bits, fewer forward passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedel.core.prefix import frozen_steps
from fedel.data.dataset import Dataset
from fedel.data.transforms import Images, LogMel, MaskedTokens, Plain
from fedel.training.trainer import TorchTrainer
from fedel.types import LocalWork, TimingProfile, Trained, TrainSpec

from .toys import make_model

NUM_SAMPLES = 50
SAMPLE_BYTES = 6 * 8 * 8 * 4 + 8
"""Output of the toy's second block, and a label."""
EVERYTHING, SOME = 2**20, 20 * SAMPLE_BYTES
SELECTED = frozenset({"blocks.three.conv.weight", "blocks.three.bn.bias"})
STEPS = LocalWork(num_steps=18, batch_size=8, lr=0.05)
EPOCHS = LocalWork(num_steps=0, num_epochs=3, batch_size=8, lr=0.05)


def train(
    data: Dataset, profile: TimingProfile, work: LocalWork, room: int, end: int = 3, last_share: float = 1.0
) -> tuple[Trained, list[int]]:
    """What came of it, and the sizes of the batches that the first block saw."""
    model, sizes = make_model(norm=True), []
    model.blocks["one"].register_forward_hook(lambda _m, x, _y: sizes.append(len(x[0])))
    trainer = TorchTrainer(model, data, np.arange(7, 7 + NUM_SAMPLES), profile)
    spec = TrainSpec(work, work.steps_for(NUM_SAMPLES), 5, SELECTED, exits=(3,), end=end, last_share=last_share)
    return trainer.train(model.tensors(), replace(spec, prefix_cache_bytes=room)), sizes


@pytest.mark.parametrize("work", [STEPS, EPOCHS], ids=["steps", "epochs"])
@pytest.mark.parametrize("room", [EVERYTHING, SOME])
def test_same_bits_with_fewer_passes(data: Dataset, profile: TimingProfile, work: LocalWork, room: int) -> None:
    without, all_sizes = train(data, profile, work, 0)
    with_cache, sizes = train(data, profile, work, room)
    assert without.loss == with_cache.loss
    assert without.loss_square == with_cache.loss_square
    for name, patch in without.patches.items():
        assert np.array_equal(patch.values, with_cache.patches[name].values), name
    num_steps = work.steps_for(NUM_SAMPLES)
    assert num_steps == len(all_sizes)
    assert set(sizes) <= {8, 2}, "a kernel must not see batches of other sizes"
    priced = frozen_steps(work, NUM_SAMPLES, num_steps, SAMPLE_BYTES, room)
    assert len(sizes) == pytest.approx(priced, abs=1.5)
    assert len(sizes) < num_steps


def test_same_bits_with_a_short_last_step(data: Dataset, profile: TimingProfile) -> None:
    without, with_cache = (train(data, profile, STEPS, room, last_share=0.5)[0] for room in (0, EVERYTHING))
    assert 0.5 == without.last_share == with_cache.last_share
    assert without.loss == with_cache.loss
    for name, patch in without.patches.items():
        assert np.array_equal(patch.values, with_cache.patches[name].values), name


def test_room_is_a_bound(data: Dataset, profile: TimingProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedel.training import trainer as module

    made = []

    class Watched(module.PrefixCache):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(module, "PrefixCache", Watched)
    train(data, profile, STEPS, SOME)
    (cache,) = made
    assert len(cache._kept) == 20
    assert len(cache._next) <= STEPS.batch_size


@pytest.mark.parametrize(
    ("work", "end", "flip"),
    [(replace(STEPS, num_steps=6), 3, False), (STEPS, 1, False), (STEPS, 3, True)],
    ids=["one pass", "nothing frozen", "augmented"],
)
def test_every_step_runs_where_nothing_can_be_kept(
    data: Dataset, profile: TimingProfile, work: LocalWork, end: int, flip: bool
) -> None:
    data = replace(data, transform=replace(data.transform, flip=flip))  # type: ignore[type-var]
    _, sizes = train(data, profile, work, EVERYTHING, end)
    assert [8] * work.num_steps == sizes


def test_data_set_knows_whether_it_is_augmented(data: Dataset) -> None:
    tokens = MaskedTokens(vocab_size=256, mask_id=1, special_ids=(0, 1))
    for transform, augmented in (
        (Images(), False),
        (Images(flip=True), True),
        (Images(padding=2), True),
        (LogMel(), False),
        (LogMel(shift=1), True),
        (tokens, True),
        (Plain(), False),
    ):
        assert augmented == replace(data, transform=transform).augmented, transform


def test_price_grows_as_room_shrinks() -> None:
    rooms = range(0, 101 * 8, 8)
    prices = [frozen_steps(LocalWork(batch_size=10), 100, 50, 8.0, room) for room in rooms]
    assert prices[0] == 50
    assert prices[-1] == 10
    assert prices == sorted(prices, reverse=True)
