"""One way in to all data: a known name, or the user's own function ``package.module:function``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedel.data.dataset import Dataset, Kind, Split, Transform
from fedel.data.files import data_root
from fedel.data.registry import entry
from fedel.data.store import get_command
from fedel.data.transforms import Images, Plain, measure
from fedel.data.vision import digits
from fedel.errors import DataError
from fedel.types import Array


def load_data(name: str, root: str | Path | None = None, *, num_train: int = 0, **options: Any) -> Dataset:
    """A data set by name (``fedel data list`` shows them), or what ``package.module:function`` returns.

    ``root`` is the directory of data sets (see ``data_root``). ``num_train`` keeps so many training samples,
    spread evenly over all of them; 0 keeps all. ``options`` go to the loader or the function.
    """
    data = _load(name, root, options)
    if not 0 <= num_train <= len(data.train):
        raise DataError(f"{name}: num_train = {num_train}, but there are {len(data.train)} training samples")
    return replace(data, train=data.train.some(num_train)) if num_train else data


def _load(name: str, root: str | Path | None, options: Mapping[str, Any]) -> Dataset:
    if ":" in name:
        function = _function(name)
        _check_options(name, function, options)
        return _own(name, function(**options))
    if name == "digits":
        _check_options(name, digits, options)
        return digits(**options)
    known = entry(name)
    folder = data_root(root) / name
    if not folder.exists():
        raise DataError(f"{name} is not in {folder.parent}; run {get_command(known)}")
    _check_options(name, known.load, options)
    return known.load(folder, **options)


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    accepted = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    wrong = [key for key in options if key not in accepted]
    if wrong and not takes_any:
        valid = ", ".join([*(p for p in accepted if p not in ("folder", "path", "name")), "num_train"])
        raise DataError(f"{name}: unknown option {wrong[0]!r}; valid are: {valid}")


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(import_module(module), attribute)
    except ImportError as problem:
        raise DataError(
            f"{name}: cannot import {module} ({problem}); is it installed or in this directory?"
        ) from problem
    except AttributeError as problem:
        raise DataError(f"{name}: module {module} has no {attribute!r}") from problem
    if not callable(function):
        raise DataError(f"{name}: {attribute} is a {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]


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
