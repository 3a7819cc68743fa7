"""Your own data: arrays in any layout, files larger than memory, data sets of torch, folders of pictures."""

from __future__ import annotations

import logging
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, Subset, TensorDataset

from fedel import plugins
from fedel.data import Dataset, from_arrays, from_torch, load_data
from fedel.data.own import as_dataset
from fedel.errors import DataError
from fedel.types import Array

Y = np.arange(12) % 3


def pixels(*shape: int) -> Array:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def of(x: Array, y: Array = Y) -> Dataset:
    return from_arrays("mine", x, y, x[:6], y[:6])


def test_images_with_channels_last_and_grey_ones_are_moved_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = pixels(12, 3, 8, 9)
    with caplog.at_level(logging.INFO):
        moved = of(np.moveaxis(x, 1, -1).copy())
        grey = of(x[:, 0])
    for data, expected in ((moved, of(x)), (grey, of(x[:, :1]))):
        batch, _ = data.train_batch(np.arange(5))
        np.testing.assert_array_equal(expected.train_batch(np.arange(5))[0], batch)
        assert batch.flags.c_contiguous
    assert "mine: samples (8, 9, 3) look like images; taken as (3, 8, 9)" in caplog.messages
    assert "mine: samples (8, 9) look like images; taken as (1, 8, 9)" in caplog.messages


def test_floats_with_channels_last_stay_and_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    data = of(np.zeros((12, 8, 8, 3), np.float32))
    assert data.input_shape == (8, 8, 3)
    assert "move the channels first: x.transpose(0, 3, 1, 2)" in caplog.text


@pytest.mark.parametrize(
    ("y", "warning"),
    [
        (
            Y + 1,
            "mine: labels begin at 1, so there is a class 0 without samples; if that is not meant, subtract 1",
        ),
        (2 * Y, "mine: no training sample has the label 1, 3"),
        (Y, ""),
    ],
)
def test_classes_without_samples_are_a_warning(
    y: Array, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    of(np.zeros((12, 4), np.float32), y)
    assert [warning] * bool(warning) == caplog.messages


def test_a_data_set_prints_as_one_line() -> None:
    data = of(pixels(12, 1, 4, 4))
    assert repr(data) == "Dataset('mine': 12 training + 6 test samples of uint8 (1, 4, 4), 3 classes)"
    assert repr(data.train) == "Split(12 samples of uint8 (1, 4, 4))"


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_file_larger_than_the_memory_used_is_read_by_the_batch(tmp_path: Path, dtype: type) -> None:
    rows = 200_000_000 // (3 * 64 * 64 * np.dtype(dtype).itemsize)
    x = np.memmap(tmp_path / "x.raw", dtype, "w+", shape=(rows, 3, 64, 64))  # sparse: takes no space
    x[5] = 7
    y = np.arange(rows) % 4
    tracemalloc.start()
    data = from_arrays("large", x, y, x, y)
    batch, _ = data.train_batch(np.array([5, rows - 1]), np.random.default_rng(0))
    next(data.test_batches(64))
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch[0].mean() > batch[1].mean()
    assert peak_bytes < 100e6, "a copy of all of it would be 200 MB"
    assert kept_bytes < 10e6


class Counted(TorchDataset[Any]):
    """Samples that are made when they are asked for; ``targets`` as in torchvision."""

    def __init__(self, count: int, targets: Any = None, kind: str = "tensor") -> None:
        self.count, self.kind, self.read = count, kind, 0
        if targets is not None:
            self.targets = targets

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        self.read += 1
        if self.kind == "picture":
            return Image.fromarray(np.full((8, 9, 3), row, np.uint8)), row % 3
        return torch.full((1, 4, 4), float(row)), row % 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_torch_data_sets_are_read_when_a_batch_needs_them() -> None:
    train = Counted(1000, targets=[n % 3 for n in range(1000)])
    data = from_torch(train, Counted(6, targets=torch.arange(6) % 3))
    before = train.read
    assert before < 300, "the first, some labels, and 256 to look for NaN"
    x, y = data.train_batch(np.array([7, 400]))
    assert ([7.0, 400.0], [1, 1]) == (x.mean((1, 2, 3)).tolist(), y.tolist())
    assert train.read == before + 2
    assert [6] == [len(batch) for batch, _ in data.test_batches()]


def test_labels_are_read_where_targets_are_missing_or_wrong() -> None:
    for targets in (None, list(range(30)), [0, 1]):
        data = from_torch(Counted(30, targets), Subset(Counted(9, targets=[n % 3 for n in range(9)]), [2, 1]))
        assert (np.arange(30) % 3).tolist() == data.train.y.tolist()
        assert [2, 1] == data.test.y.tolist()


def test_pictures_of_torch_data_sets_are_normalised_with_channels_first() -> None:
    data = from_torch(Counted(200, kind="picture"), Counted(5, kind="picture"))
    assert (data.kind, data.input_shape) == ("image", (3, 8, 9))
    assert abs(data.train_batch(np.arange(200))[0].mean()) < 0.01


def test_fewer_samples_of_a_torch_data_set_are_not_read_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    train = Counted(1000, targets=[n % 3 for n in range(1000)])
    pair = (train, Counted(6))
    monkeypatch.setattr(plugins, "find", lambda *_: lambda: pair)
    data = load_data("mine:pair", num_train=10)
    assert (10, 6) == (len(data.train), len(data.test))
    assert data.train_batch(np.array([9]))[0].mean() == 999


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            (np.zeros((3, 2)), np.arange(3)),
            "returned a tuple of 2; return four arrays .* or a fedel.data.Dataset",
        ),
        ({"x": 1}, "returned a dict with 'x'; return four arrays"),
        (7, "returned a int; return four arrays"),
        ((Stream(), Counted(3)), "training set is a Stream, which is not map-style"),
        ((TensorDataset(torch.zeros(3, 2)), Counted(3)), "item 0 is a tuple; expected a sample and its label"),
        ((Counted(0), Counted(3)), "training set: contains no samples"),
        (([(np.zeros(2), 0.5)], Counted(3)), "returned a tuple of 2"),
    ],
)
def test_what_is_no_data_set_is_refused(made: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_dataset("mine", made)


def test_samples_of_unequal_shape_are_refused_when_they_are_read() -> None:
    class Uneven(Counted):
        def __getitem__(self, row: int) -> Any:
            return np.zeros(2 if row < 5 else 3, np.uint8), row % 3

    data = from_torch(Uneven(9), Uneven(3))
    with pytest.raises(
        DataError, match=r"sample 7 is uint8 of shape \(3,\), but sample 0 is uint8 of shape \(2,\)"
    ):
        data.train_batch(np.array([7]))


def test_a_dict_of_arrays_is_a_data_set() -> None:
    x = pixels(12, 1, 4, 4)
    data = as_dataset("mine", {"x_test": x[:6], "y_test": Y[:6], "x_train": x, "y_train": Y})
    assert (12, 6) == (len(data.train), len(data.test))


def test_a_function_of_the_user_that_fails_or_lacks_an_argument_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failing_data.py").write_text("def load(path):\n    raise OSError('no disk')\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(DataError, match=r"needs `path`: give it in \[workload.data_options\]"):
        load_data("failing_data:load")
    with pytest.raises(DataError, match="data set 'failing_data:load' failed: OSError: no disk"):
        load_data("failing_data:load", path="x")
    assert 'failing_data.py", line 2' in caplog.text


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes, dark and light, of ten pictures each, in several formats and sizes."""
    for name, level in (("dark", 20), ("light", 230)):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for n in range(10):
            suffix, mode = [("jpg", "RGB"), ("png", "L"), ("PNG", "RGBA"), ("bmp", "RGB")][n % 4]
            picture = Image.new("RGB", (20 + n, 30), (level, level, level)).convert(mode)
            picture.save(tmp_path / "pets" / name / f"{n}.{suffix}")
        (tmp_path / "pets" / name / "notes.txt").write_text("not a picture")
    return tmp_path / "pets"


def test_a_folder_of_pictures_is_split_by_seed(pictures: Path) -> None:
    data = load_data(f"folder:{pictures}", size=16)
    assert (("dark", "light"), (3, 16, 16)) == (data.classes, data.input_shape)
    assert [8, 8] == np.bincount(data.train.y).tolist()
    assert [2, 2] == np.bincount(data.test.y).tolist()
    assert ((data.train.x.mean((1, 2, 3)) > 128) == data.train.y).all()
    assert data.augmented is False
    again = load_data(f"folder:{pictures}", size=16, augment=True, grey=True, test_share=0.5)
    assert (again.augmented, again.input_shape, len(again.test)) == (True, (1, 16, 16), 10)


def test_folders_for_training_and_testing_are_taken_as_they_are(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    pictures.rename(tmp_path / "both" / "train")
    with pytest.raises(DataError, match="has a folder `train` but none called test, val"):
        load_data(f"folder:{tmp_path / 'both'}")
    for name in ("dark", "light"):
        place = tmp_path / "both" / "val" / name
        place.mkdir(parents=True)
        Image.new("RGB", (5, 5)).save(place / "only.png")
    data = load_data(f"folder:{tmp_path / 'both'}", size=8)
    assert (20, 2) == (len(data.train), len(data.test))
    (tmp_path / "both" / "val" / "dark").rename(tmp_path / "both" / "val" / "other")
    with pytest.raises(DataError, match="other: a class without training pictures"):
        load_data(f"folder:{tmp_path / 'both'}", size=8)


def test_wrong_folders_are_refused_in_words(pictures: Path) -> None:
    wrong = (
        (f"folder:{pictures}/none", {}, "there is no such folder"),
        (f"folder:{pictures}/dark", {}, r"0 subfolder\(s\); give each of at least 2 classes a subfolder"),
        (f"folder:{pictures}", {"sise": 3}, "unknown option 'sise'; did you mean 'size'"),
        (f"folder:{pictures}", {"size": 0}, "a size is at least 1"),
    )
    for name, options, message in wrong:
        with pytest.raises(DataError, match=message):
            load_data(name, **options)  # type: ignore[arg-type]
    (pictures / "dark" / "broken.jpg").write_bytes(b"GIF89a, not a JPEG")
    with pytest.raises(DataError, match=r"broken.jpg: not a readable picture"):
        load_data(f"folder:{pictures}")
    (pictures / "empty").mkdir()
    with pytest.raises(DataError, match="empty: holds no picture"):
        load_data(f"folder:{pictures}")


def test_a_job_names_only_folders_that_the_device_allows(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pictures.parent)
    with plugins.only(plugins.Allowed()):
        assert len(load_data("folder:pets", size=4).train) == 16
        for path in (str(pictures), "../pets", "pets/../pets", "~/pets"):
            with pytest.raises(
                DataError, match=r"jobs may name files below this machine's working directory only"
            ):
                load_data(f"folder:{path}", size=4)
    with plugins.only(plugins.Allowed(files=(str(pictures.parent),))):
        assert len(load_data(f"folder:{pictures}", size=4).train) == 16


def test_a_module_of_ones_own_may_be_called_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But a folder of that name comes first, and a name that is neither is a folder that is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(DataError, match="there is no such folder"):
        load_data("folder:numbers")
    (tmp_path / "folder.py").write_text(
        "import numpy as np\n\ndef numbers():\n    x, y = np.zeros((6, 4), np.float32), np.arange(6) % 2\n"
        "    return x, y, x, y\n"
    )
    try:
        assert 6 == len(load_data("folder:numbers").train)
        (tmp_path / "numbers").mkdir()
        with pytest.raises(DataError, match="numbers"):
            load_data("folder:numbers")
    finally:
        sys.modules.pop("folder", None)
