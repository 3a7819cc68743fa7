"""Reads the pickle files of CIFAR-10 with a small reader of its own: nothing in a file can run code.

The standard library's ``Unpickler`` can be told which functions a file may call, but not how much memory and
time it may take: four bytes can ask for gigabytes. This reader knows only what such files need, and its values
take no more than a few times the size of the file.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedel.errors import DataError

MOST_BYTES = 512 * 1024 * 1024
_LISTED = "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "NONE", "NEWTRUE", "NEWFALSE"
_NUMBERS = "BININT1", "BININT", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"
_OLD_BYTES = "SHORT_BINSTRING", "BINSTRING", "STRING"
"""Text of Python 2, which is bytes."""
_TEXTS = (
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"),
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name(NamedTuple):
    """A function or class that the file names; it is only ever compared."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_ARRAY = _Name("numpy", "ndarray")
_DTYPE = _Name("numpy", "dtype")
_ENCODE = _Name("_codecs", "encode")
_RECONSTRUCT = (
    _Name("numpy.core.multiarray", "_reconstruct"),
    _Name("numpy._core.multiarray", "_reconstruct"),
)
_ALLOWED = (_ARRAY, _DTYPE, _ENCODE, *_RECONSTRUCT)


class _Unfilled:
    """An array before its shape and values are known."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._room = 2 * len(data)
        """Bytes that may still be copied: values are copied at most twice."""

    def read(self) -> Any:
        for opcode, argument, _ in pickletools.genops(self._data):
            if opcode.name == "STOP":
                break
            self._step(opcode.name, argument)
        return self._stack.pop()

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _NUMBERS or name in _TEXTS:
            stack.append(argument)
        elif name in _OLD_BYTES:
            stack.append(argument.encode("latin1"))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif name in _LISTED:
            stack.append([[], {}, (), None, True, False][_LISTED.index(name)])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in ("APPEND", "APPENDS"):
            items = self._last(1) if name == "APPEND" else self._marked()
            _checked(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._last(2) if name == "SETITEM" else self._marked()
            self._set(_checked(stack[-1], dict), items)
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in _TUPLES:
            stack.append(tuple(self._last(_TUPLES[name])))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, named = argument.split(" ", 1) if argument else self._last(2)
            stack.append(_allowed(_Name(module, named)))
        elif name == "REDUCE":
            function, arguments = self._last(2)
            stack.append(self._call(function, arguments))
        elif name == "BUILD":
            made, state = self._last(2)
            stack.append(self._filled(made, state))
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it contains {name}, which is not allowed")

    def _last(self, number: int) -> list[Any]:
        if len(self._stack) < number:
            raise ValueError("it takes more values than it holds")
        items = self._stack[-number:]
        del self._stack[-number:]
        return items

    def _marked(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    @staticmethod
    def _set(table: dict[bytes, Any], items: list[Any]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Other keys may take for ever to hash.
            table[key.encode() if isinstance(key, str) else _checked(key, bytes)] = value

    def _call(self, function: _Name, arguments: Any) -> Any:
        """What one of the allowed functions would return."""
        if function == _ENCODE:
            text, encoding = arguments
            if encoding != "latin1":
                raise ValueError(f"encoding {encoding!r} is not allowed")
            self._spend(len(text))
            return text.encode("latin1")
        if function == _DTYPE:
            return _dtype(arguments[0])
        if function in _RECONSTRUCT and arguments[0] == _ARRAY:
            return _Unfilled()
        raise ValueError("it calls something that is not a function")

    def _filled(self, made: Any, state: Any) -> Any:
        if isinstance(made, np.dtype):
            return made.newbyteorder(_order(state[1]))
        if not isinstance(made, _Unfilled):
            raise ValueError(f"it fills a {type(made).__name__}")
        _, shape, dtype, by_columns, data = state
        if not isinstance(dtype, np.dtype) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("an array has no proper type or shape")
        self._spend(len(data))
        return (
            np.frombuffer(_checked(data, bytes), dtype).reshape(shape, order="F" if by_columns else "C").copy()
        )

    def _spend(self, num_bytes: int) -> None:
        self._room -= num_bytes
        if self._room < 0:
            raise ValueError("its values take more room than the file itself")


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


def _allowed(name: _Name) -> _Name:
    if name not in _ALLOWED:
        raise ValueError(f"it uses {name}, which is not allowed")
    return name


def _dtype(code: str | bytes) -> np.dtype[Any]:
    text = code.decode("ascii") if isinstance(code, bytes) else _checked(code, str)
    if len(text) > 3 or text.lstrip("<>|=")[:1] not in tuple("biuf"):
        raise ValueError(f"arrays of dtype {text[:20]!r} are not allowed")
    return np.dtype(text)


def _order(code: Any) -> Any:
    text = code.decode("ascii") if isinstance(code, bytes) else code
    if text not in ("<", ">", "|", "="):
        raise ValueError("an array has an unknown byte order")
    return text


def load_numbers(path: Path) -> dict[bytes, Any]:
    """Read a dictionary of arrays, lists and byte strings from a pickle; anything else is a DataError."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise DataError(f"{path}: {size:,} bytes are too many for a batch; download the file again")
        content = _Reader(path.read_bytes()).read()
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as problem:
        raise DataError(
            f"{path}: not a readable batch of numbers ({problem}); download the file again"
        ) from problem
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror})") from problem
    if not isinstance(content, dict):
        raise DataError(f"{path}: contains a {type(content).__name__}, expected a dictionary of arrays")
    return content
