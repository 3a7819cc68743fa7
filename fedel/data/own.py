"""Your own data: arrays, or data sets of torch, become a data set of FedEL."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedel.data.dataset import Dataset, Kind, Split, Transform
from fedel.data.lazy import Lazy, Source, channels_first, has_channels_last
from fedel.data.transforms import Images, Plain, measure
from fedel.errors import DataError
from fedel.types import Array

_log = logging.getLogger(__name__)
PARTS = ("x_train", "y_train", "x_test", "y_test")
EXPECTED = (
    "return four arrays (x_train, y_train, x_test, y_test), a dict with these names, two map-style data sets of"
    " torch (train, test), or a fedel.data.Dataset"
)


def as_dataset(name: str, made: Any) -> Dataset:
    """What the user's function returned."""
    if isinstance(made, Dataset):
        return made
    if isinstance(made, Mapping):
        if set(made) != set(PARTS):
            raise DataError(
                f"{name}: returned a dict with {', '.join(map(repr, made)) or 'nothing'}; {EXPECTED}"
            )
        made = tuple(made[part] for part in PARTS)
    if isinstance(made, tuple | list) and len(made) == 2 and not any(_is_array(part) for part in made):
        train, test = made
        return from_torch(train, test, name)
    if not isinstance(made, tuple | list) or len(made) != 4:
        size = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise DataError(f"{name}: returned a {type(made).__name__}{size}; {EXPECTED}")
    try:
        x_train, y_train, x_test, y_test = (np.asarray(part) for part in made)
    except ValueError as problem:
        raise DataError(
            f"{name}: a part is not an array ({problem}); make every sample the same shape"
        ) from problem
    return from_arrays(name, x_train, y_train, x_test, y_test)


def from_arrays(name: str, x_train: Array, y_train: Array, x_test: Array, y_test: Array) -> Dataset:
    """Arrays as a data set: bytes of images are normalised, everything else is taken as it is.

    Images are (N, C, H, W); bytes (N, H, W, C) and (N, H, W) are moved there. An array that maps a file stays
    one: nothing but the samples of a batch is read.
    """
    moved = channels_first(x_train)
    if moved.shape != x_train.shape:
        _log.info("%s: samples %s look like images; taken as %s", name, x_train.shape[1:], moved.shape[1:])
    elif has_channels_last(x_train.shape):
        _log.warning(
            "%s: samples of shape %s look like images with their channels last, but floats go to the model as"
            " they are; if they are images, move the channels first: x.transpose(0, 3, 1, 2)",
            name,
            x_train.shape[1:],
        )
    return _from_splits(name, Split(moved, y_train), Split(channels_first(x_test), y_test))


def from_torch(train: Source, test: Source, name: str = "torch") -> Dataset:
    """Two map-style data sets of torch, read sample by sample: nothing but the labels is kept in memory.

    An item is a sample (tensor, array or image) and a label. Bytes of images are normalised, floats are not.
    """
    splits = []
    for part, source in (("training set", train), ("test set", test)):
        where = f"{name}: {part}"
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise DataError(
                f"{where} is a {type(source).__name__}, which is not map-style; give it __len__ and __getitem__"
            )
        splits.append(Split(Lazy.of(source, where), _labels(source, where)))
    return _from_splits(name, *splits)


def _from_splits(name: str, train: Split, test: Split) -> Dataset:
    for what, y in (("y_train", train.y), ("y_test", test.y)):
        if y.dtype == object or not np.issubdtype(y.dtype, np.integer) or y.size == 0:
            raise DataError(f"{name}: {what} has dtype {y.dtype}, {y.size} entries; labels are integers from 0")
    num_classes = max(1, int(max(train.y.max(), test.y.max())) + 1)
    kind: Kind = "other"
    transform: Transform = Plain()
    if train.x.ndim == 4 and train.x.dtype == np.uint8 and len(train):
        kind, transform = "image", Images(*measure(train.x))
    made = Dataset(name, kind, train, test, tuple(str(n) for n in range(num_classes)), transform)
    _warn_of_absent_classes(made)
    return made


def _warn_of_absent_classes(data: Dataset) -> None:
    """Only for one label per sample: of many tokens, some may well be rare."""
    if data.train.y.ndim != 1:
        return
    absent = np.flatnonzero(np.bincount(data.train.y, minlength=data.num_classes) == 0).tolist()
    if absent == [0] and 0 not in data.test.y:
        _log.warning(
            "%s: labels begin at 1, so there is a class 0 without samples; if that is not meant, subtract 1",
            data.name,
        )
    elif absent:
        shown = ", ".join(map(str, absent[:10])) + (", ..." if len(absent) > 10 else "")
        _log.warning("%s: no training sample has the label %s", data.name, shown)


def _is_array(part: Any) -> bool:
    return hasattr(part, "dtype") or isinstance(part, list | tuple)


def _labels(source: Source, where: str) -> Array:
    """From ``targets``, as the data sets of torchvision have them, if they are right; else by reading all."""
    known, total = _targets(source), len(source)
    if known is not None and len(known) == total and np.issubdtype(known.dtype, np.integer) and known.ndim == 1:
        rows = sorted({0, total // 2, total - 1})
        if all(known[row] == _label(source[row][1], row, where) for row in rows):
            return known.astype(np.int64)
    _log.info("%s: all %d samples are read once for their labels", where, total)
    return np.array([_label(source[row][1], row, where) for row in range(total)], np.int64)


def _targets(source: Any) -> Array | None:
    if hasattr(source, "indices") and hasattr(source, "dataset"):  # torch's Subset
        whole = _targets(source.dataset)
        return None if whole is None else whole[np.asarray(source.indices)]
    targets = getattr(source, "targets", None)
    return None if targets is None else np.asarray(targets)


def _label(label: Any, row: int, where: str) -> int:
    value = np.asarray(label)
    if value.ndim or not np.issubdtype(value.dtype, np.integer):
        raise DataError(f"{where}: label of item {row} is {label!r}; labels are integers from 0")
    return int(value)
