"""Batches: shapes, normalisation, augmentation, determinism, and refusal of arrays that cannot be right."""

from __future__ import annotations

import numpy as np
import pytest

from fedel.data.dataset import IGNORE, Dataset, Split
from fedel.data.transforms import Images, LogMel, MaskedTokens, measure, shift_frames
from fedel.errors import DataError


def images(count: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 3, 8, 8), np.uint8)


def toy(transform: Images) -> Dataset:
    y = np.arange(12) % 3
    return Dataset("toy", "image", Split(images(), y), Split(images(), y), ("a", "b", "c"), transform)


def test_test_batches_are_normalised_and_in_order() -> None:
    data = toy(Images((0.5, 0.4, 0.3), (0.2, 0.2, 0.1), padding=2, flip=True))
    x, y = zip(*data.test_batches(5), strict=True)
    expected = (images() / 255.0 - np.reshape((0.5, 0.4, 0.3), (3, 1, 1))) / np.reshape(
        (0.2, 0.2, 0.1), (3, 1, 1)
    )
    assert [len(part) for part in y] == [5, 5, 2]
    np.testing.assert_allclose(expected, np.concatenate(x), atol=1e-5)
    np.testing.assert_array_equal(data.test.y, np.concatenate(y))


def test_test_batches_with_a_limit_are_spread_over_the_set() -> None:
    x, _ = next(toy(Images()).test_batches(5, limit=3))
    np.testing.assert_allclose(images()[[0, 5, 11]] / 255.0, x, atol=1e-6)


def test_training_batches_depend_on_the_generator_only() -> None:
    data = toy(Images(padding=2, flip=True))
    rows = np.array([3, 1, 4, 1])
    first, again, other = (data.train_batch(rows, np.random.default_rng(seed))[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_allclose(images()[rows] / 255.0, data.train_batch(rows)[0], atol=1e-6)


def test_every_augmented_image_is_a_crop_or_the_mirror_of_one() -> None:
    data = toy(Images(padding=2, flip=True))
    x, _ = data.train_batch(np.arange(12), np.random.default_rng(0))
    got = np.rint(x * 255).astype(np.uint8)
    padded = np.pad(images(), ((0, 0), (0, 0), (2, 2), (2, 2)))
    mirrored = moved = 0
    for row in range(12):
        crops = {
            (flip, t, left): padded[row, :, t : t + 8, left : left + 8][..., :: -1 if flip else 1]
            for flip in (False, True) for t in range(5) for left in range(5)
        }  # fmt: skip
        found = [key for key, crop in crops.items() if np.array_equal(crop, got[row])]
        assert len(found) == 1
        mirrored += found[0][0]
        moved += found[0][1:] != (2, 2)
    assert 0 < mirrored < 12
    assert moved > 6


def test_training_leaves_the_stored_samples_as_they_are() -> None:
    data = toy(Images(padding=2, flip=True))
    data.train_batch(np.arange(12), np.random.default_rng(0))
    np.testing.assert_array_equal(images(), data.train.x)


def test_shift_moves_later_and_fills_with_silence() -> None:
    x = np.array([[[[1, 2, 3, 4]]], [[[1, 2, 3, 4]]]], np.uint8)
    expected = [[0, 1, 2, 3], [3, 4, 0, 0]]
    assert expected == shift_frames(x, np.array([1, -2]))[:, 0, 0].tolist()


def test_measured_statistics_standardise_log_mel() -> None:
    x = images()[:, :1]
    out, _ = LogMel(*measure(x))(x, np.zeros(12, np.int64), None)
    assert abs(out.mean()) < 0.01
    assert abs(out.std() - 1) < 0.01


def test_masked_tokens_corrupt_15_percent_as_80_10_10_and_never_special_ones() -> None:
    x = np.random.default_rng(0).integers(5, 1000, (2000, 64)).astype(np.uint16)
    x[:, 0], x[:, -1] = 2, 3
    masking = MaskedTokens(1000, 4, (0, 1, 2, 3, 4))
    tokens, targets = masking(x, x, np.random.default_rng(1))
    chosen = targets != IGNORE
    assert (tokens.dtype, targets.dtype) == (np.int64, np.int64)
    assert not chosen[:, [0, -1]].any()
    assert abs(chosen[:, 1:-1].mean() - 0.15) < 0.005
    np.testing.assert_array_equal(x[chosen], targets[chosen])
    np.testing.assert_array_equal(x[~chosen], tokens[~chosen])
    masked, kept = (tokens[chosen] == 4).mean(), (tokens[chosen] == x[chosen]).mean()
    assert abs(masked - 0.8) < 0.02
    assert abs(kept - 0.1) < 0.02
    assert tokens.min() >= 2


def test_test_corruption_does_not_depend_on_the_batch() -> None:
    x = np.random.default_rng(0).integers(5, 100, (10, 64))
    masking = MaskedTokens(100, 4, (0, 1, 2, 3, 4))
    together = masking(x, x, None)
    alone = masking(x[7:8], x[7:8], None)
    np.testing.assert_array_equal(together[0][7:8], alone[0])
    np.testing.assert_array_equal(together[1][7:8], alone[1])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (images(3), np.array([0, 1]), "3 samples but 2 labels"),
        (images(2), np.array([0, -1]), "label -1 is negative"),
        (images(2), np.array([0, 3]), "label 3 but 3 classes"),
        (images(2), np.array([0.0, 1.0]), "labels have dtype float64"),
        (np.array([[1], [1, 2]], object), np.array([0, 1]), "dtype object"),
        (images(0), np.zeros(0, int), "no samples"),
        (np.full((1, 3, 8, 8), np.nan), np.array([0]), "NaN or infinity"),
    ],
)
def test_impossible_arrays_are_refused_with_a_reason(x: np.ndarray, y: np.ndarray, message: str) -> None:
    good = Split(images(), np.arange(12) % 3)
    with pytest.raises(DataError, match=message):
        Dataset("toy", "image", Split(x, y), good, ("a", "b", "c"), Images())
