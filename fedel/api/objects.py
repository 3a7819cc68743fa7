"""Names for models, data and methods that are given as Python objects, so that a job can speak of them."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedel import plugins
from fedel.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from fedel.data.dataset import Dataset

MAX_HASHED = 1000
"""Samples of an array that its hash looks at, spread evenly: arrays may be larger than memory."""


@dataclass(frozen=True)
class Objects:
    """The objects of a job that lie in no module, by their names."""

    by_name: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def known(self) -> AbstractContextManager[None]:
        """A context in which a job may name them."""
        return plugins.given(self.by_name)

    def model(self, made: Any) -> str:
        """The name of a function that makes the model."""
        from torch import nn

        if isinstance(made, str):
            return made
        if isinstance(made, nn.Module):
            raise ModelError(
                "model: a module is given; give the function or class that makes it, because every run draws"
                " the first weights from its own seed: model=lambda: Net(...)"
            )
        if not callable(made):
            raise ModelError(f"model: {_kind(made)}; give a function that returns a torch.nn.Module, or a name")
        return self.name(made)

    def data(self, made: Any) -> str:
        """The name of a data set, of a function that makes it, or of arrays."""
        from fedel.data.dataset import Dataset

        if isinstance(made, str):
            return made
        if callable(made):
            return self.name(made)
        if not isinstance(made, Dataset | tuple | list | Mapping):
            raise DataError(
                f"data: {_kind(made)}; give (x_train, y_train, x_test, y_test), a fedel.data.Dataset, a"
                " function that returns one of these, or a name"
            )
        label = made.name if isinstance(made, Dataset) else "arrays"
        return self._keep(f"{label}-{_digest(_of_data(made))}", lambda: made)

    def strategy(self, made: Any) -> dict[str, Any]:
        """The table of a method: of its name, its class or an instance of it."""
        from fedel.strategies import METHODS, describe

        if isinstance(made, str):
            return {"name": made}
        if isinstance(made, Mapping):
            return dict(made)
        kind = made if isinstance(made, type) else type(made)
        if not hasattr(kind, "plan"):
            raise ConfigError(
                f"strategy: {_kind(made)}; give the name of a method, a table, or a Method object"
            )
        name = str(getattr(kind, "name", ""))
        name = name if METHODS.get(name) is kind else self.name(kind)
        if isinstance(made, type):
            return {"name": name}
        table = {**describe(made), "name": name}
        return {**table, "base": self.strategy(made.base)} if "base" in table else table

    def name(self, made: Callable[..., Any]) -> str:
        """``package.module:attribute`` if it lies there, or else a name by which this process knows it."""
        if path := path_of(made):
            return path
        label = getattr(made, "__name__", type(made).__name__).strip("<>")
        return self._keep(f"{label}-{_digest(_of_code(made, set()))}", made)

    def _keep(self, name: str, made: Callable[..., Any]) -> str:
        self.by_name[f"{plugins.GIVEN}{name}"] = made
        return f"{plugins.GIVEN}{name}"


def path_of(made: Any) -> str:
    """Where another process finds a function or class; empty if it does not.

    >>> path_of(path_of), path_of(lambda: None)
    ('fedel.api.objects:path_of', '')
    """
    module, name = getattr(made, "__module__", ""), getattr(made, "__qualname__", "")
    if module == "__main__" or getattr(sys.modules.get(module or ""), name or " ", None) is not made:
        return ""
    return f"{module}:{name}"


def _kind(made: Any) -> str:
    return f"{type(made).__name__} is not one" if made is not None else "nothing is given"


def _digest(parts: Iterator[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
        found.update(b"\0")
    return found.hexdigest()[:8]


def _of_data(made: Dataset | tuple[Any, ...] | list[Any] | Mapping[str, Any]) -> Iterator[bytes]:
    from fedel.data.dataset import Dataset

    if isinstance(made, Dataset):
        train, test = made.train, made.test
        yield repr((made.kind, made.classes, made.transform)).encode()
        parts: list[Any] = [train.x, train.y, train.users, test.x, test.y]
    else:
        parts = list(made.values()) if isinstance(made, Mapping) else list(made)
    for part in parts:
        if not hasattr(part, "shape") and not isinstance(part, tuple | list):
            yield type(part).__name__.encode()
            continue
        number = len(part)
        array = part if hasattr(part, "shape") else np.asarray(part, dtype=object)
        rows = np.linspace(0, max(0, number - 1), min(number, MAX_HASHED)).astype(int)
        yield repr((tuple(array.shape), str(array.dtype))).encode()
        sample = np.ascontiguousarray(array[rows])
        yield repr(sample.tolist()).encode() if sample.dtype == object else sample.tobytes()


def _of_code(made: Any, seen: set[int]) -> Iterator[bytes]:
    """What a function or class does: its instructions, and those of what it uses in its own module."""
    if id(made) in seen:
        return
    seen.add(id(made))
    if isinstance(made, functools.partial):
        yield from _of_code(made.func, seen)
        for name, value in (*(("", value) for value in made.args), *sorted(made.keywords.items())):
            yield from _of_value(name, value, "", seen)
    elif isinstance(made, type):
        yield made.__qualname__.encode()
        for name, value in vars(made).items():
            if not name.startswith("__") or name in ("__init__", "__call__"):
                yield from _of_value(name, value, made.__module__, seen)
        for base in made.__bases__:
            if base.__module__ == made.__module__:
                yield from _of_code(base, seen)
    elif isinstance(made, FunctionType):
        yield from _of_instructions(made.__code__)
        for value in (*(made.__defaults__ or ()), *(cell.cell_contents for cell in made.__closure__ or ())):
            yield from _of_value("", value, made.__module__, seen)
        for name in _names(made.__code__):
            if name in made.__globals__:
                yield from _of_value(name, made.__globals__[name], made.__module__, seen)
    else:
        yield f"{type(made).__module__}:{type(made).__qualname__}".encode()
        yield from _of_code(type(made), seen)


def _of_value(name: str, value: Any, module: str, seen: set[int]) -> Iterator[bytes]:
    values = value if isinstance(value, tuple) else (value,)
    if all(isinstance(each, str | int | float | None) for each in values):
        yield f"{name}={value!r}".encode()
    elif isinstance(value, FunctionType | type) and value.__module__ == module:
        yield name.encode()
        yield from _of_code(value, seen)


def _of_instructions(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_instructions(constant)
        else:
            # The order of a set differs from process to process.
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
