"""One way in to all data: a known name, a folder of pictures, or your own function (see ``fedel.plugins``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedel import plugins
from fedel.config import nearest
from fedel.data import folder
from fedel.data.dataset import Dataset
from fedel.data.files import data_root
from fedel.data.own import as_dataset
from fedel.data.registry import ENTRIES
from fedel.data.store import get_command
from fedel.errors import DataError

GROUP = "fedel.data"
"""Entry points of installed packages that bring data sets."""


def load_data(
    name: str, root: str | Path | None = None, *, num_train: int = 0, num_test: int = 0, **options: Any
) -> Dataset:
    """A data set by name (``fedel data list`` shows them), ``folder:PATH``, or what ``package.module:function``
    returns.

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
    if name.startswith(folder.PREFIX) and not _is_function(name):
        path = plugins.path_of(name.removeprefix(folder.PREFIX), "data set", DataError)
        _check_options(name, folder.image_folder, options)
        return folder.image_folder(path, **options)
    if name not in ENTRIES:
        function = plugins.find(name, GROUP, "data set", DataError, ENTRIES)
        _check_options(name, function, options)
        made = plugins.call(function, options, f"data set '{name}'", "workload.data_options", DataError)
        return as_dataset(name, made)
    known, place = ENTRIES[name], data_root(root) / name
    if not known.package and not place.exists():
        raise DataError(f"{name} is not in {place.parent}; run {get_command(known)}")
    _check_options(name, known.load, options)
    return known.load(place, **options)


def _is_function(name: str) -> bool:
    """Whether it names a function of the user's own module ``folder``, not a folder of pictures."""
    word = name.removeprefix(folder.PREFIX)
    return word.isidentifier() and not Path(word).exists() and plugins.has_module("folder")


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    accepted = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    wrong = [key for key in options if key not in accepted]
    if wrong and not takes_any:
        valid = [*(p for p in accepted if p not in ("folder", "path", "name")), "num_train", "num_test"]
        raise DataError(f"{name}: unknown option {wrong[0]!r}; {nearest(wrong[0], valid)}")
