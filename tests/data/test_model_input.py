"""What a model takes, kept with its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedel.data import Dataset, from_arrays
from fedel.data.model_input import FILE, ModelInput, Normalisation
from fedel.data.transforms import Images, LogMel
from fedel.errors import ConfigError
from fedel.types import Array

LABELS = np.arange(8) % 2


def images(dtype: type = np.uint8) -> Dataset:
    pixels = np.random.default_rng(3).integers(0, 256, (8, 3, 5, 4)).astype(dtype)
    return from_arrays("toy", pixels, LABELS, pixels, LABELS)


class Doubled:
    def __call__(self, x: Array, y: Array, _: np.random.Generator | None) -> tuple[Array, Array]:
        return 2 * x.astype(np.float32), y


def test_bytes_are_scaled_and_normalised_in_the_same_bits() -> None:
    data = images()
    takes = ModelInput.of(data)
    assert ((3, 5, 4), "float32", ("0", "1")) == (takes.shape, takes.dtype, takes.classes)
    assert isinstance(data.transform, Images)
    assert Normalisation(255.0, data.transform.mean, data.transform.std) == takes.normalisation
    factor, shift = (part.reshape(1, 3, 1, 1) for part in takes.normalisation.factors())
    expected, _ = data.train_batch(np.arange(8))
    np.testing.assert_array_equal(expected, data.train.x.astype(np.float32) * factor - shift)


def test_floats_are_taken_as_they_are() -> None:
    takes = ModelInput.of(images(np.float32))
    assert (None, "") == (takes.normalisation, takes.transform)
    assert "float32 of shape (N, 3, 5, 4), as in the data" == takes.in_words(normalised=True)


def test_tokens() -> None:
    tokens = np.ones((8, 6), np.int32)
    takes = ModelInput.of(from_arrays("text", tokens, LABELS, tokens, LABELS))
    assert ("int64", (2, 6)) == (takes.samples(2).dtype.name, takes.samples(2).shape)


def test_one_mean_for_all_channels_and_none() -> None:
    data = images()
    assert (
        Normalisation(255.0, (0.5,), (0.25,)) == ModelInput.of(replace(data, transform=LogMel())).normalisation
    )
    assert (
        Normalisation(255.0, (0.0,), (1.0,)) == ModelInput.of(replace(data, transform=Images())).normalisation
    )


def test_a_transform_of_the_users_own_is_named() -> None:
    takes = ModelInput.of(replace(images(), transform=Doubled()))
    assert (None, "Doubled") == (takes.normalisation, takes.transform)
    assert "as the transform Doubled of the data returns it" in takes.in_words(normalised=True)


def test_words() -> None:
    takes = ModelInput.of(images())
    assert "values from 0 to 255; the model normalises them itself" in takes.in_words(normalised=True)
    assert "(x / 255 - mean) / std of values from 0 to 255" in takes.in_words(normalised=False)


def test_file(tmp_path: Path) -> None:
    assert ModelInput.load(tmp_path) is None
    takes = ModelInput.of(images())
    takes.save(tmp_path)
    assert takes == ModelInput.load(tmp_path)
    text = (tmp_path / FILE).read_text(encoding="utf-8")
    (tmp_path / FILE).write_text(text.replace("255.0", "0.0"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"input\.json: .*above 0"):
        ModelInput.load(tmp_path)
