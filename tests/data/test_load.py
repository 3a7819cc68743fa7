"""The one way in: names, the user's own function, options, and messages that help."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from fedel.data import from_arrays, load_data
from fedel.errors import DataError
from tests.data.test_vision import write_cifar

OWN = """
import numpy as np
from fedel.data import from_arrays

def images(count=6):
    x = np.random.default_rng(0).integers(0, 256, (count, 1, 8, 8), np.uint8)
    y = np.arange(count) % 3
    return x, y, x[:3], y[:3]

def dataset():
    return from_arrays("mine", *images())

def three():
    return images()[:3]

number = 5
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_data_module.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "own_data_module", raising=False)
    return "own_data_module"


def test_a_known_name_is_loaded_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path / "cifar10" / "cifar-10-batches-py")
    assert 20 == len(load_data("cifar10", tmp_path).train)
    monkeypatch.setenv("FEDEL_DATA", str(tmp_path))
    x, _ = load_data("cifar10", augment=False).train_batch(np.arange(4), np.random.default_rng(0))
    plain, _ = load_data("cifar10").train_batch(np.arange(4))
    np.testing.assert_array_equal(plain, x)


def test_own_function_with_options_and_own_dataset(own_module: str) -> None:
    data = load_data(f"{own_module}:images", count=9)
    assert (9, 3, ("0", "1", "2"), "image") == (len(data.train), len(data.test), data.classes, data.kind)
    assert abs(data.train_batch(np.arange(9))[0].mean()) < 0.01
    assert "mine" == load_data(f"{own_module}:dataset").name


def test_floats_are_taken_as_they_are() -> None:
    x = np.random.default_rng(0).normal(size=(5, 7))
    data = from_arrays("rows", x, np.arange(5), x, np.arange(5))
    np.testing.assert_allclose(
        x.astype(np.float32), data.train_batch(np.arange(5), np.random.default_rng(0))[0]
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar10", {}, "cifar10 is not in .*; run `fedel data get cifar10`"),
        ("no_such_module:f", {}, "there is no module 'no_such_module', neither in"),
        ("own_data_module:absent", {}, "has no 'absent'"),
        ("own_data_module:number", {}, "'number' is a int; name a function or a class"),
        ("own_data_module:three", {}, "returned a tuple of 3"),
        ("own_data_module:images", {"size": 3}, "unknown option 'size'; valid are: count"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_mistakes_are_explained(tmp_path: Path, name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_data(name, tmp_path, **options)


def test_digits_come_with_scikit_learn_or_say_so() -> None:
    if importlib.util.find_spec("sklearn") is None:
        with pytest.raises(DataError, match="pip install scikit-learn"):
            load_data("digits")
    else:
        data = load_data("digits")
        assert (1498, 299, (1, 8, 8)) == (len(data.train), len(data.test), data.input_shape)


def test_fewer_training_samples_are_spread_over_all_and_the_test_set_stays() -> None:
    whole, some = load_data("digits"), load_data("digits", num_train=100)
    assert (len(some.train), len(some.test)) == (100, len(whole.test))
    assert set(some.train.y) == set(whole.train.y)
    assert (some.train.x[-1] == whole.train.x[-1]).all()
    few = load_data("digits", num_test=50)
    assert (len(whole.train), 50) == (len(few.train), len(few.test))
    with pytest.raises(DataError, match="num_test = 99999"):
        load_data("digits", num_test=99999)
    with pytest.raises(DataError, match="num_train = 99999"):
        load_data("digits", num_train=99999)


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(DataError, match=r"data set 'digit' is unknown .*; did you mean 'digits'"):
        load_data("digit")
