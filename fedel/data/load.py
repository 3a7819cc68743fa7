"""One way in to all data: a known name, or the user's own function (see ``fedel.plugins``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedel import plugins
from fedel.config import nearest
from fedel.data.dataset import Dataset, Kind, Split, Transform
from fedel.data.files import data_root
from fedel.data.registry import ENTRIES
from fedel.data.store import get_command
from fedel.data.transforms import Images, Plain, measure
from fedel.errors import DataError
from fedel.types import Array

GROUP = "fedel.data"
"""Entry points of installed packages that bring data sets."""


def load_data(
    name: str, root: str | Path | None = None, *, num_train: int = 0, num_test: int = 0, **options: Any
) -> Dataset:
    """A data set by name (``fedel data list`` shows them), or what ``package.module:function`` returns.

    ``root`` is the directory of data sets (see ``data_root``). ``num_train`` and ``num_test`` are the
    numbers of samples to keep, spread evenly over all of them; 0 keeps all. ``options`` go to the loader or
    the function.
    """
    data = _load(name, root, options)
    for option, number, split in (("num_train", num_train, data.train), ("num_test", num_test, data.test)):
        if not 0 <= number <= len(split):
            kind = option.removeprefix("num_")
            raise DataError(f"{name}: {option} = {number}, but there are {len(split)} {kind} samples")
    train = data.train.some(num_train) if num_train else data.train
    return replace(data, train=train, test=data.test.some(num_test) if num_test else data.test)


def _load(name: str, root: str | Path | None, options: Mapping[str, Any]) -> Dataset:
    if name not in ENTRIES:
        function = plugins.find(name, GROUP, "data set", DataError, ENTRIES)
        _check_options(name, function, options)
        return _own(name, function(**options))
    known, folder = ENTRIES[name], data_root(root) / name
    if not known.package and not folder.exists():
        raise DataError(f"{name} is not in {folder.parent}; run {get_command(known)}")
    _check_options(name, known.load, options)
    return known.load(folder, **options)


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    accepted = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    wrong = [key for key in options if key not in accepted]
    if wrong and not takes_any:
        valid = [*(p for p in accepted if p not in ("folder", "path", "name")), "num_train", "num_test"]
        raise DataError(f"{name}: unknown option {wrong[0]!r}; {nearest(wrong[0], valid)}")


def _own(name: str, made: Any) -> Dataset:
    if isinstance(made, Dataset):
        return made
    if not isinstance(made, tuple | list) or len(made) != 4:
        size = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise DataError(
            f"{name}: returned a {type(made).__name__}{size}; expected (x_train, y_train, x_test, y_test) "
            "or a Dataset"
        )
    try:
        x_train, y_train, x_test, y_test = (np.asarray(part) for part in made)
    except ValueError as problem:
        raise DataError(
            f"{name}: a part is not an array ({problem}); make every sample the same shape"
        ) from problem
    return from_arrays(name, x_train, y_train, x_test, y_test)


def from_arrays(name: str, x_train: Array, y_train: Array, x_test: Array, y_test: Array) -> Dataset:
    """Arrays as a data set: uint8 (N, C, H, W) is normalised as images, everything else is taken as it is."""
    for what, y in (("y_train", y_train), ("y_test", y_test)):
        if y.dtype == object or not np.issubdtype(y.dtype, np.integer) or y.size == 0:
            raise DataError(f"{name}: {what} has dtype {y.dtype}, {y.size} entries; labels are integers from 0")
    num_classes = int(max(y_train.max(), y_test.max())) + 1
    kind: Kind = "other"
    transform: Transform = Plain()
    if x_train.ndim == 4 and x_train.dtype == np.uint8 and len(x_train):
        kind, transform = "image", Images(*measure(x_train))
    classes = tuple(str(n) for n in range(max(1, num_classes)))
    return Dataset(name, kind, Split(x_train, y_train), Split(x_test, y_test), classes, transform)
